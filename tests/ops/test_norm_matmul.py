"""Norm and product in one op: its reference is that of its parts, kernels at awkward shapes."""

import numpy as np
import pytest
from harness import check_cuda, run_cuda, run_numpy

from tinyvllm.driver.devices import DEVICES
from tinyvllm.ops import matmul_kernels
from tinyvllm.ops.executor import described, plan_program
from tinyvllm.ops.lower import RULES, fuse_norm, fuse_silu_mul, lower
from tinyvllm.ops.program import INPUT, OUTPUT, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

H200 = DEVICES["sm_90a"]


def normed_product(N, K, *, silu=False, bias=False, dtype=None, read_again=False):
    p = Program("test")
    x = p.buffer("x", ("T", K), kind=INPUT)
    h = p.emit("rms_norm", "h", x=x, weight=p.weight("norm", K), eps=1e-5)

    def linear(name, **options):
        b = p.weight(f"{name}.b", N) if bias else None
        return p.emit("matmul", name, x=h, weight=p.weight(f"{name}.w", N, K), bias=b, **options)

    if silu:
        gate, up = linear("gate"), linear("up")
        p.emit("silu_mul", "y", gate=gate, up=up, out_kind=OUTPUT)
    else:
        linear("y", dtype=dtype, out_kind=OUTPUT)
    if read_again:
        p.emit("add", "z", a=h, b=h, out_kind=OUTPUT)
    return p


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setitem(RULES, "test", [fuse_silu_mul, fuse_norm])
    return lambda program: lower(program, "test")


def random_arrays(program, M, seed=0):
    """Inputs of spread magnitudes, weights scaled so that results are of order one."""
    rng = np.random.default_rng(seed)
    K = program.buffers["x"].shape[1]
    x = rng.standard_normal((M, K), np.float32) * np.float32(8) ** rng.integers(-2, 3, (M, 1))
    arrays = {"x": x.astype(np.float32)}
    for w in program.weights.values():
        scale = 1 if len(w.shape) == 1 else w.shape[1] ** -0.5
        arrays[w.name] = rng.standard_normal(w.shape, np.float32) * np.float32(scale)
    return arrays


@pytest.mark.parametrize(("silu", "kind"), [(False, "norm_matmul"), (True, "norm_matmul_silu_mul")])
@pytest.mark.parametrize("bias", [False, True])
def test_reference_is_that_of_the_parts(fused, silu, kind, bias):
    program = normed_product(24, 40, silu=silu, bias=bias)
    lowered = fused(program)
    assert [op.kind for op in lowered.ops] == [kind]
    assert set(lowered.buffers) == {"x", "y"}, "the normed x exists only inside the op"
    arrays = random_arrays(program, 5)
    want, have = (run_numpy(p, {"T": 5}, arrays)["y"] for p in (program, lowered))
    np.testing.assert_allclose(have, want, atol=1e-5)


def test_a_norm_that_is_read_again_stays_apart(fused):
    kinds = [op.kind for op in fused(normed_product(24, 40, read_again=True)).ops]
    assert kinds == ["rms_norm", "matmul", "add"]


def test_a_norm_that_no_product_reads_stays_apart(fused):
    p = Program("t")
    p.buffer("x", ("T", 40), kind=INPUT)
    p.buffer("rows", ("S",), DType.I32, INPUT)
    p.emit("rms_norm", "h", x="x", weight=p.weight("norm", 40), eps=1e-5)
    p.emit("select_rows", "y", x="h", index="rows", out_kind=OUTPUT)
    assert [op.kind for op in fused(p).ops] == ["rms_norm", "select_rows"]


def launches(fused, M, act=DType.BF16):
    program = fused(normed_product(2048, 2048, silu=True))
    return op_def("norm_matmul_silu_mul").launches(
        described(program, program.ops[0], {"T": M}, act), H200
    )


def test_one_kernel_where_the_kernel_for_few_rows_runs(fused):
    assert [one.spec.kernel for one in launches(fused, 1)] == [matmul_kernels.MATMUL_FEW_ROWS]
    norm, product = launches(fused, 64)
    assert norm.spec.kernel.file == "rms_norm.cu"
    assert product.spec.kernel is matmul_kernels.MATMUL_HOPPER


def test_float16_is_normed_first(fused):
    """x * norm_weight could be beyond its range, where the normed x is not."""
    assert len(launches(fused, 1, DType.FP16)) == 2


def test_scratch_is_planned_for_the_normed_x(fused):
    program = fused(normed_product(24, 40))
    plan = plan_program(program, {"T": 7}, DType.BF16, H200)
    assert plan.offsets["scratch.0"] + 7 * 40 * 2 <= plan.arena_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("N", "K"), [(1, 8), (7, 40), (48, 1032), (64, 576), (1000, 2048), (520, 4168)]
)
def test_kernel(device, fused, N, K, silu, act):
    if silu:
        N = -(-N // 8) * 8
    for M, bias in ((1, False), (2, True), (7, False), (8, True), (9, False), (65, True)):
        program = normed_product(N, K, silu=silu, bias=bias)
        arrays = random_arrays(program, M, seed=M)
        check_cuda(device, program, fused(program), {"T": M}, arrays, act, {"T": M + 5})


@pytest.mark.gpu
def test_kernel_float32_results(device, fused):
    program = normed_product(1009, 2048, dtype=DType.F32)
    for M in (1, 3, 33):
        arrays = random_arrays(program, M)
        check_cuda(device, program, fused(program), {"T": M}, arrays, limits={"T": M + 5})


@pytest.mark.gpu
def test_few_rows_do_not_depend_on_their_number(device, fused):
    program = normed_product(1000, 2048)
    arrays = random_arrays(program, 2)
    both = run_cuda(device, fused(program), {"T": 2}, arrays)["y"]
    one = run_cuda(device, fused(program), {"T": 1}, arrays | {"x": arrays["x"][:1]})["y"]
    np.testing.assert_array_equal(one, both[:1])
