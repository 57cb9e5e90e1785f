"""Norms inside of products: the launches by rows, and the kernels against the primitives."""

from dataclasses import replace

import numpy as np
import pytest
from harness import check_cuda, run_cuda

from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops import matmul_choice
from tinyvllm.ops.lower import lower
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

H200 = DeviceInfo("H200", (9, 0), 132, 227 << 10, 50 << 20, 140 << 30, "hopper")
EPS = 1e-5


def program(N, K, *, silu=False, bias=False, dtype=None):
    p = Program("test")
    x = p.buffer("x", ("T", K), kind=INPUT)
    h = p.emit("rms_norm", "h", x=x, weight=p.weight("norm", K), eps=EPS)

    def product(name, **options):
        b = p.weight(f"{name}.b", N) if bias else None
        return p.emit("matmul", name, x=h, weight=p.weight(f"{name}.w", N, K), bias=b, **options)

    if silu:
        p.emit("silu_mul", "y", gate=product("gate"), up=product("up"), out_kind=OUTPUT)
    else:
        product("y", dtype=dtype, out_kind=OUTPUT)
    return p


def inputs(program, M, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((M, program.buffers["x"].shape[1]), np.float32)
    x *= 10.0 ** np.arange(-2, M - 2).clip(-2, 2)[:, None]  # each row has a factor of its own
    arrays = {"x": x}
    for w in program.weights.values():
        scale = 1 if len(w.shape) == 1 else w.shape[1] ** -0.5
        arrays[w.name] = rng.standard_normal(w.shape, np.float32) * np.float32(scale)
    return arrays


def launches(M, N, K, scratch=4096):
    a = Operands(
        x=DeviceArray(0, (M, K), DType.BF16),
        norm_weight=DeviceArray(0, (K,), DType.BF16),
        weight=DeviceArray(0, (N, K), DType.BF16),
        bias=None,
        y=DeviceArray(0, (M, N), DType.BF16),
        eps=EPS,
        act=DType.BF16,
        scratch=scratch,
    )
    op = op_def("rms_norm_matmul")
    return op.launches(a, H200), op.scratch(a, H200)


@pytest.mark.parametrize(
    "M, N, kernel",
    [(1, 2048, matmul_choice.MATMUL_FEW_ROWS), (16, 16384, matmul_choice.MATMUL_WIDE)],
)
def test_few_rows_are_one_launch_that_normalises(M, N, kernel):
    (launch,), _ = launches(M, N, 2048)
    assert launch.spec.kernel is kernel
    assert launch.spec.template_args[-2:] == ("true", "false")
    assert launch.args[-1] == EPS


def test_many_rows_are_normalised_into_scratch_memory_first():
    (norm, product), scratch = launches(33, 2048, 2048)
    assert scratch == 33 * 2048 * 2
    assert norm.spec.kernel.entry == "rms_norm_kernel"
    assert product.spec.kernel is matmul_choice.MATMUL_WIDE
    assert norm.args[2] == product.args[0] == 4096


@pytest.fixture(params=["auto", "portable", "no clusters"])
def path(request, device, monkeypatch):
    """Selects the kernels for this GPU, or those for GPUs that lack its instructions."""
    if request.param != "auto":
        monkeypatch.setattr(device, "info", replace(device.info, kernel_path="portable"))
    if request.param == "no clusters":
        monkeypatch.setattr(matmul_choice, "_has_clusters", lambda info: False)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    "M, N, K",
    [
        (1, 64, 576),
        (1, 16384, 2048),
        (7, 40, 40),
        (8, 1000, 2048),
        (12, 136, 1032),
        (70, 1000, 576),
    ],
)
def test_kernel(device, path, M, N, K, silu, act):
    for bias in (False, True):
        p = program(N, K, silu=silu, bias=bias)
        check_cuda(device, p, lower(p, "decode"), {"T": M}, inputs(p, M), act, {"T": M + 3})


@pytest.mark.gpu
def test_kernel_float32_results_of_an_odd_vocabulary(device, path):
    p = program(4099, 576, dtype=DType.F32)
    for M in (1, 5):
        check_cuda(device, p, lower(p, "decode"), {"T": M}, inputs(p, M))


@pytest.mark.gpu
def test_few_rows_do_not_depend_on_their_number(device):
    p = lower(program(1000, 2048), "decode")
    arrays = inputs(p, 8)
    together = run_cuda(device, p, {"T": 8}, arrays)["y"]
    for rows in (1, 3):
        alone = run_cuda(device, p, {"T": rows}, arrays | {"x": arrays["x"][:rows]})["y"]
        np.testing.assert_array_equal(alone, together[:rows])
