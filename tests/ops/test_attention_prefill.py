"""Prefill attention: which kernel and tile it gets, and the kernels at awkward lengths."""

from dataclasses import replace

import numpy as np
import pytest
from harness import check_cuda, outputs_of, run_cuda
from test_attention import attention_program, constants, operands, problem

from tinyvllm.driver import tensor_map
from tinyvllm.driver.devices import DEVICES_BY_NAME
from tinyvllm.driver.spec import TensorMap
from tinyvllm.ops import attention_prefill
from tinyvllm.ops.attention import Attention
from tinyvllm.ops.attention_prefill import PREFILL, PREFILL_HOPPER, PREFILL_TILES, choose_tile
from tinyvllm.util import DType

H200 = DEVICES_BY_NAME["H200"]
PORTABLE = replace(H200, kernel_path="portable")
CHUNKS = [(n, earlier) for n in (1, 7, 17, 64, 65, 300) for earlier in (0, 5, 16, 333)]
# Rows of chunks that need several windows of 32 rows, and of more tiles than an H200 has SMs.
MANY_ROWS = [(n % 131 + 1, 3 * n) for n in range(80)]
MANY_TILES = [(1500, 700), (1, 64), (2049, 0)]


def arguments(launch):
    return {n: v for (_, n), v in zip(launch.spec.kernel.params, launch.args, strict=True)}


def prefill_of(device, rows, queries, heads=32, kv_heads=8, head_dim=64, **sizes):
    """The launch and its arguments for rows of `queries` each after some decode rows."""
    a = operands(rows, heads, kv_heads, head_dim, queries=queries, **{"context": 9000, **sizes})
    launch = Attention().launches(a, device)[-1]
    return launch, arguments(launch)


def test_constants_are_those_of_the_kernels():
    assert constants("attention_prefill.cu") == {
        "kThreads": attention_prefill.THREADS,
        "kQueries": attention_prefill.QUERIES,
        "kKeys": attention_prefill.KEYS,
    }
    hopper = constants("attention_prefill_hopper.cu")
    assert hopper == {
        "kKeys": attention_prefill.HOPPER_KEYS,
        "kStages": attention_prefill.HOPPER_STAGES,
    }


@pytest.mark.parametrize("device", DEVICES_BY_NAME.values(), ids=lambda d: d.name)
def test_the_kernel_is_that_of_the_path(device):
    for decode in (0, 3):
        launch, _ = prefill_of(device, 4, 100, decode=decode)
        hopper = device.name == "H200"
        assert launch.spec.kernel is (PREFILL_HOPPER if hopper else PREFILL)
    assert prefill_of(PORTABLE, 4, 100, decode=0)[0].spec.kernel is PREFILL


@pytest.mark.parametrize(
    ("head_dim", "tokens", "rows", "heads", "consumers"),
    [
        (64, 8192, 1, 32, 3),
        (64, 4096, 1, 32, 3),
        (64, 2048, 1, 32, 2),
        (64, 1024, 1, 32, 2),
        (64, 32768, 32, 32, 2),
        (64, 8192, 16, 32, 2),
        (64, 1, 1, 9, 2),
        (128, 8192, 1, 32, 2),
    ],
)
def test_tiles_are_those_that_were_measured_to_win(head_dim, tokens, rows, heads, consumers):
    assert choose_tile(head_dim, tokens, rows, heads, 132).consumers == consumers


@pytest.mark.parametrize("head_dim", PREFILL_TILES)
def test_tiles_fit_the_device(head_dim):
    for tile in PREFILL_TILES[head_dim]:
        assert tile.smem(head_dim) <= H200.smem_per_block
        assert tile.queries <= tensor_map.MAX_BOX


def test_rows_of_one_token_are_left_to_the_decode_kernel():
    _, args = prefill_of(H200, 7, 130, decode=4)
    assert args["num_rows"] == 3
    assert args["query_start"] == args["batch_slots"] == args["seq_lens"] == 4 * 4


@pytest.mark.parametrize("queries", [1, 127, 128, 129, 192, 193, 1000])
@pytest.mark.parametrize("rows", [1, 2, 50])
def test_no_tile_lacks_a_block_while_sms_are_free(rows, queries):
    launch, _ = prefill_of(H200, rows, queries, heads=3, kv_heads=1, decode=0)
    (tile,) = (t for t in PREFILL_TILES[64] if launch.block == 128 * (t.consumers + 1))
    tiles = rows * 3 * -(-queries // tile.queries)
    assert min(tiles, H200.num_sms) <= launch.grid[0] <= H200.num_sms


def test_tensor_maps_are_those_of_the_buffers():
    """Whatever the step's sizes and layer: they are encoded once."""

    def maps(rows, queries, layer):
        a = operands(rows, 32, 8, 128, decode=0, context=9000, queries=queries, block_size=32)
        a.q, a.layer = replace(a.q, max_rows=8192), layer
        args = arguments(Attention().launches(a, H200)[0])
        assert args["layer_row"] == layer * 2 * 8 * 32 and args["block_rows"] == 2 * 2 * 8 * 32
        return args["q_map"], args["kv_map"]

    q, kv = maps(1, 100, 0)
    assert maps(3, 700, 1) == (q, kv)
    assert q == TensorMap(0, DType.BF16, 8192, 4096, 4096, 128, 64)
    assert kv == TensorMap(0, DType.BF16, 100 * 2 * 2 * 8 * 32, 128, 128, 32, 64)
    for m in (q, kv):
        tensor_map._check(m)


# "portable", or which of Hopper's tiles for heads of that size.
KERNELS = {64: ["portable", 0, 1], 128: ["portable", 0]}


@pytest.fixture
def use(device, monkeypatch):
    """Makes the op use this kernel."""

    def set_kernel(kernel):
        if kernel == "portable":
            monkeypatch.setattr(device, "info", replace(device.info, kernel_path="portable"))
        elif device.info.kernel_path != "hopper":
            pytest.skip("not a Hopper GPU")
        else:
            tiles = {head_dim: t[kernel : kernel + 1] for head_dim, t in PREFILL_TILES.items()}
            monkeypatch.setattr(attention_prefill, "PREFILL_TILES", tiles)

    return set_kernel


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "group", "kv_heads", "head_dim", "block_size", "act"),
    [
        (kernel, *case)
        for case in (
            (1, 2, 64, 8, DType.BF16),
            (3, 1, 64, 16, DType.FP16),
            (4, 2, 64, 32, DType.BF16),
            (5, 1, 64, 16, DType.BF16),
            (8, 1, 64, 64, DType.FP16),
            (1, 2, 128, 16, DType.BF16),
            (3, 1, 128, 8, DType.FP16),
            (4, 1, 128, 32, DType.FP16),
            (5, 1, 128, 16, DType.BF16),
            (8, 1, 128, 64, DType.BF16),
        )
        for kernel in KERNELS[case[2]]
    ],
)
def test_chunks(device, use, kernel, group, kv_heads, head_dim, block_size, act):
    use(kernel)
    shape = (group * kv_heads, kv_heads, head_dim, block_size)
    dims, arrays = problem(CHUNKS, *shape)
    # Rows of one token among chunks are the prefill kernel's too.
    dims |= {"D": 0, "Q": 320}
    program = attention_program(*shape)
    check_cuda(device, program, program, dims, arrays, act, {"T": dims["T"] + 5})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "rows", "head_dim"),
    [(k, rows, d) for d in KERNELS for k in KERNELS[d] for rows in (MANY_ROWS, MANY_TILES)],
    ids=str,
)
def test_more_rows_and_tiles_than_are_in_flight(device, use, kernel, rows, head_dim):
    use(kernel)
    shape = (8, 2, head_dim, 16)
    dims, arrays = problem(rows, *shape)
    dims |= {"D": 0, "Q": max(new for new, _ in rows)}
    program = attention_program(*shape)
    check_cuda(device, program, program, dims, arrays)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "head_dim"), [(k, d) for d in KERNELS for k in KERNELS[d]])
def test_mixed_rows(device, use, kernel, head_dim):
    use(kernel)
    shape = (9, 3, head_dim, 16)
    dims, arrays = problem([(1, 200), (1, 0), (1, 900), (77, 50), (1, 64), (300, 0)], *shape)
    program = attention_program(*shape)
    first = check_cuda(device, program, program, dims, arrays)["y"]
    np.testing.assert_array_equal(run_cuda(device, program, dims, arrays)["y"], first)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", KERNELS)
def test_result_depends_on_nothing_but_the_row(device, use, head_dim):
    """To the bit: with any tile, in a batch or alone, whole or in chunks; several times over, as
    launches leave the counter of tiles as they found it."""
    shape = (8, 2, head_dim, 16)
    dims, arrays = problem([(1000, 300), (129, 0), (2, 500)], *shape)
    program = attention_program(*shape, outputs=("y", "again", "and_again"))
    use(0)
    want = run_cuda(device, program, dims, arrays)["y"]
    for kernel in KERNELS[head_dim][1:]:
        use(kernel)
        got = run_cuda(device, program, dims, arrays)
        for output in outputs_of(program):
            np.testing.assert_array_equal(got[output], want)
        for start, end in ((0, 137), (137, 392), (392, 1000)):
            chunk = {
                "q": arrays["q"][start:end],
                "query_start": np.array([0, end - start], np.int32),
                "batch_slots": arrays["batch_slots"][:1],
                "seq_lens": np.array([300 + end], np.int32),
            }
            sizes = {"T": end - start, "R": 1, "R1": 2, "D": 0, "Q": end - start}
            got = run_cuda(device, program, dims | sizes, arrays | chunk)
            np.testing.assert_array_equal(got["y"], want[start:end])
