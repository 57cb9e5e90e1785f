"""Matrix products: the reference, and the kernels at awkward shapes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from harness import check_cuda, run_cuda, run_numpy

from tinyvllm.driver.spec import DeviceInfo, TensorMap
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops import matmul, matmul_choice
from tinyvllm.ops.lower import lower
from tinyvllm.ops.matmul_tiles import HOPPER_TILES
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, Buffer, Program
from tinyvllm.util import DType

H200 = DeviceInfo("H200", (9, 0), 132, 227 << 10, 140 << 30, "hopper")
ROWS = [1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 64, 65, 127, 130, 192, 257]
SHAPES = [
    (1, 8),
    (7, 40),
    (48, 1032),
    (64, 576),
    (576, 1032),
    (1000, 2048),
    (1536, 576),
    (520, 4168),
]


def product(N, K, *, bias=False, dtype=None):
    p = Program("test")
    x = p.buffer("x", ("T", K), kind=INPUT)
    p.emit(
        "matmul",
        "y",
        x=x,
        weight=p.weight("w", N, K),
        bias=p.weight("b", N) if bias else None,
        dtype=dtype,
        out_kind=OUTPUT,
    )
    return p


def residual_product(N, K, *, bias=False):
    p = product(N, K, bias=bias)
    p.buffers["y"] = Buffer("y", ("T", N), None)
    residual = p.buffer("residual", ("T", N), kind=INPUT)
    p.emit("add", "sum", a=residual, b="y", out_kind=OUTPUT)
    return p


def gated_product(N, K, *, bias=False):
    p = Program("test")
    x = p.buffer("x", ("T", K), kind=INPUT)
    gate, up = (
        p.emit(
            "matmul",
            n,
            x=x,
            weight=p.weight(f"{n}.w", N, K),
            bias=p.weight(f"{n}.b", N) if bias else None,
        )
        for n in ("gate", "up")
    )
    p.emit("silu_mul", "y", gate=gate, up=up, out_kind=OUTPUT)
    return p


def random_arrays(program, M, seed=0):
    """Standard normal inputs, weights scaled so that results are of order one."""
    rng = np.random.default_rng(seed)
    arrays = {
        b.name: rng.standard_normal((M, b.shape[1]), np.float32) for b in program.of_kind(INPUT)
    }
    for w in program.weights.values():
        scale = 1 if len(w.shape) == 1 else w.shape[1] ** -0.5
        arrays[w.name] = rng.standard_normal(w.shape, np.float32) * np.float32(scale)
    return arrays


@pytest.mark.parametrize("bias", [False, True])
def test_reference_equals_float64_product(bias):
    program = product(7, 40, bias=bias)
    arrays = random_arrays(program, 5)
    expected = arrays["x"].astype(float) @ arrays["w"].astype(float).T
    if bias:
        expected += arrays["b"]
    np.testing.assert_allclose(run_numpy(program, {"T": 5}, arrays)["y"], expected, atol=1e-5)


def test_reference_writes_into_column_views():
    wide = np.full((3, 20), np.nan, np.float32)
    x, weight = np.ones((3, 8), np.float32), np.ones((4, 8), np.float32)
    matmul.Matmul().reference(Operands(x=x, weight=weight, bias=None, y=wide[:, 8:12]))
    assert (wide[:, 8:12] == 8).all()
    assert np.isnan(wide[:, :8]).all() and np.isnan(wide[:, 12:]).all()


def test_depth_must_be_a_multiple_of_8():
    with pytest.raises(ValueError, match="K=12 must be a multiple of 8"):
        product(16, 12)


def operands(M, N, K, act=DType.BF16, dtype=None):
    return Operands(
        x=DeviceArray(0, (M, K), act),
        weight=DeviceArray(0, (N, K), act),
        bias=None,
        residual=None,
        y=DeviceArray(0, (M, N), dtype or act),
        act=act,
        dims={},
        scratch=0,
    )


def test_launch_takes_grid_and_cluster_from_the_choice():
    launch = matmul.matmul_launch(operands(64, 2048, 8192), H200)
    assert (launch.grid, launch.cluster, launch.args[-2]) == ((96, 1, 1), 3, 3)
    launch = matmul.matmul_launch(operands(256, 3072, 2048), H200)
    assert (launch.grid, launch.cluster, launch.args[-2]) == ((96, 1, 1), 2, 1)
    launch = matmul.matmul_launch(operands(32, 2048, 8192), H200)
    assert (launch.grid, launch.cluster, launch.args[-1]) == ((160, 1, 1), 5, 5)
    launch = matmul.matmul_launch(operands(1, 2048, 2048), H200)
    assert (launch.grid, launch.cluster) == ((128, 1, 1), 1)


def test_large_tiles_of_the_widest_rows_that_there_may_be():
    portable = replace(H200, kernel_path="portable")
    launch = matmul.matmul_launch(operands(1024, 2048, 1 << 20), portable)
    assert launch.spec.kernel.entry == "matmul_large_kernel"
    with pytest.raises(AssertionError):
        matmul.matmul_launch(operands(1024, 2048, 1 << 24), portable)


def test_maps_do_not_depend_on_the_number_of_rows():
    """They are encoded once for each buffer, whatever the steps bring."""
    few, more = operands(70, 2048, 2048), operands(90, 2048, 2048)
    for a, rows in ((few, 70), (more, 90)):
        a.x = DeviceArray(0, (rows, 2048), DType.BF16, max_rows=8192)
        a.y = DeviceArray(1 << 30, (rows, 2048), DType.BF16, max_rows=8192)
    launches = [matmul.matmul_launch(a, H200) for a in (few, more)]
    maps = [[a for a in launch.args if isinstance(a, TensorMap)] for launch in launches]
    assert maps[0] == maps[1]
    assert [m.rows for m in maps[0]] == [8192, 2048, 8192]
    silu = matmul.matmul_launch(operands(8192, 16384, 2048), H200, silu=True)
    assert silu.spec != matmul.matmul_launch(operands(8192, 16384, 2048), H200).spec


def test_cost_counts_each_operand_once():
    cost = matmul.Matmul().cost(operands(3, 16, 8, dtype=DType.F32))
    assert cost.bytes == 2 * (3 * 8 + 16 * 8) + 4 * 3 * 16
    assert cost.flops == 2 * 3 * 16 * 8


def test_silu_product_needs_twice_the_rows():
    program = SimpleNamespace(shape_of={"x": ("T", 8), "w": (48, 8), "y": ("T", 16)}.__getitem__)
    op = SimpleNamespace(
        kind="matmul_silu_mul", operands={"x": "x", "weight": "w", "y": "y"}, attrs={}
    )
    with pytest.raises(ValueError, match="48 weight rows for 16 columns"):
        matmul.MatmulSiluMul().check(program, op)


@pytest.fixture(params=["auto", "portable", "no clusters"])
def path(request, device, monkeypatch):
    """Selects the kernels for this GPU, or those for GPUs that lack its instructions."""
    if request.param != "auto":
        monkeypatch.setattr(device, "info", replace(device.info, kernel_path="portable"))
    if request.param == "no clusters":
        monkeypatch.setattr(matmul_choice, "_has_clusters", lambda info: False)


class Exact:
    """The exact product of the rounded inputs, and how far float32 rounding may be from it.

    The bound is a small fraction of one term of the sum, so one wrong or missing element shows.
    """

    def __init__(self, arrays, act=DType.BF16):
        x, w = (act.round(arrays[n]) for n in ("x", "w"))
        self.product = x.astype(float) @ w.T.astype(float)
        self.allowed = 1e-5 * (np.abs(x) @ np.abs(w).T)

    def check(self, actual):
        """Of the first rows, as many as `actual` has."""
        M = len(actual)
        wrong = np.argwhere(~(np.abs(actual - self.product[:M]) <= self.allowed[:M]))
        assert len(wrong) == 0, f"{len(wrong)} of {actual.size} wrong, at {wrong[:4].tolist()} ..."


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("N, K", SHAPES)
def test_kernel_float32_results(device, path, N, K, act):
    program = product(N, K, dtype=DType.F32)
    arrays = random_arrays(program, ROWS[-1])
    exact = Exact(arrays, act)
    for M in ROWS:
        first = arrays | {"x": arrays["x"][:M]}
        exact.check(run_cuda(device, program, {"T": M}, first, act, {"T": M + 5})["y"])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [3, 130])
def test_kernel_odd_vocabulary(device, path, M):
    program = product(49153, 64, dtype=DType.F32)
    arrays = random_arrays(program, M)
    Exact(arrays).check(run_cuda(device, program, {"T": M}, arrays)["y"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "M, N", [(256, 2048), (1000, 4090), (1100, 1544), (2300, 1544), (300, 16000)]
)
def test_kernel_larger_tiles(device, path, M, N):
    """Two groups of tiles along M, more tiles than SMs, and ragged edges."""
    program = product(N, 136, dtype=DType.F32)
    arrays = random_arrays(program, M)
    Exact(arrays).check(run_cuda(device, program, {"T": M}, arrays)["y"])


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("build", [product, residual_product, gated_product])
@pytest.mark.parametrize(
    "M, N, K",
    [
        (1, 64, 576),
        (7, 40, 40),
        (16, 1536, 2048),
        (33, 576, 1032),
        (130, 1000, 576),
        (1100, 1544, 64),
    ],
)
def test_kernel_epilogues(device, path, build, M, N, K, act):
    for bias in (False, True):
        program = build(N, K, bias=bias)
        arrays = random_arrays(program, M)
        check_cuda(device, program, lower(program, "prefill"), {"T": M}, arrays, act, {"T": M + 5})


@pytest.mark.gpu
@pytest.mark.parametrize("build", [product, residual_product])
@pytest.mark.parametrize("M", [2, 33])
def test_kernel_odd_columns_with_epilogue(device, path, build, M):
    program = build(49, 40, bias=True)
    check_cuda(device, program, lower(program, "prefill"), {"T": M}, random_arrays(program, M))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [5, 65])
def test_kernel_column_views(device, path, M):
    """Outputs into, and input from, columns of a wider buffer."""
    program = Program("test")
    x = program.buffer("x", ("T", 72), kind=INPUT)
    program.buffer("wide", ("T", 64), kind=OUTPUT)
    for name, column, width in (("left", 0, 24), ("right", 24, 40)):
        program.buffers[name] = Buffer(name, ("T", width), None, parent="wide", column=column)
        program.emit("matmul", x=x, weight=program.weight(f"{name}.w", width, 72), y=name)
    program.emit("matmul", "y", x="right", weight=program.weight("w", 16, 40), out_kind=OUTPUT)
    check_cuda(device, program, program, {"T": M}, random_arrays(program, M))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [2, 8, 65])
def test_kernel_is_reproducible_and_few_rows_do_not_depend_on_their_number(device, path, M):
    program = product(1000, 2048, dtype=DType.F32)
    arrays = random_arrays(program, M)
    first = run_cuda(device, program, {"T": M}, arrays)["y"]
    np.testing.assert_array_equal(run_cuda(device, program, {"T": M}, arrays)["y"], first)
    if M <= 8:  # both rows by matmul_few_rows.cu, or both by tiles
        part = arrays | {"x": arrays["x"][: M // 2]}
        alone = run_cuda(device, program, {"T": M // 2}, part)["y"]
        np.testing.assert_array_equal(alone, first[: M // 2])


HOPPER_LAUNCHES = [
    pytest.param(
        tile,
        split,
        act,
        id=f"{tile.rows}x{tile.cols}_c{tile.cluster}_a{tile.alternate:d}_s{split}_{act.name}",
    )
    for tile in HOPPER_TILES
    for split in sorted({1, tile.max_split})
    if tile.smem(split) <= H200.smem_per_block
    for act in (DType.BF16, DType.FP16)
    if act is DType.BF16 or (tile.cols, split) in {(64, 6), (256, 1)}  # types differ in few places
]


@pytest.mark.gpu
@pytest.mark.parametrize("tile, split, act", HOPPER_LAUNCHES)
def test_hopper_tiles(device, monkeypatch, tile, split, act):
    """Each tile with each epilogue, ragged at all edges, several tiles to a block; repeatable."""
    if device.info.kernel_path != "hopper":
        pytest.skip("needs the Hopper path")
    monkeypatch.setattr(device, "info", replace(device.info, num_sms=4))
    monkeypatch.setattr(matmul_choice, "hopper_tile", lambda *_: (tile, split))
    M, K = tile.rows * tile.cluster + 37, 64 * 2 * split + 72
    program = product(2 * tile.cols + 41, K, dtype=DType.F32)
    arrays = random_arrays(program, M)
    first, again = (run_cuda(device, program, {"T": M}, arrays, act)["y"] for _ in range(2))
    Exact(arrays, act).check(first)
    np.testing.assert_array_equal(again, first)
    for build, N in ((residual_product, 2 * tile.cols + 41), (gated_product, tile.cols + 24)):
        program = build(N, K, bias=True)
        arrays = random_arrays(program, M)
        check_cuda(device, program, lower(program, "prefill"), {"T": M}, arrays, act, {"T": M + 5})
