"""Copies of whole blocks: the right ones, all of them, and nothing else."""

import numpy as np
import pytest
from harness import run_cuda, run_numpy

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops import copy_blocks
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, STATE, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


def program(layers: int, heads: int, block_size: int, head_dim: int) -> Program:
    p = Program("t")
    p.buffer("kv_cache", ("NB", layers, 2, heads, block_size, head_dim), None, STATE)
    p.buffer("block_copies", ("CP", 2), DType.I32, INPUT)
    p.emit("copy_blocks", block_copies="block_copies", kv_cache="kv_cache")
    return p


def case(shape, copies: int):
    """(dims, arrays); a source may be copied twice, and values are those of 16-bit types."""
    rng = np.random.default_rng(0)
    blocks = 2 * copies + 3
    order = rng.permutation(blocks).astype(np.int32)
    sources = order[copies : 2 * copies]
    sources[copies // 2 :] = sources[: copies - copies // 2]
    cache = rng.integers(-64, 64, (blocks, shape[0], 2, *shape[1:])).astype(np.float32)
    arrays = {"kv_cache": cache, "block_copies": np.stack([sources, order[:copies]], 1)}
    return {"CP": copies, "NB": blocks}, arrays


def expected(arrays):
    want = arrays["kv_cache"].copy()
    for src, dst in arrays["block_copies"]:
        want[dst] = arrays["kv_cache"][src]
    return want


@pytest.mark.parametrize("copies", [0, 1, 9])
def test_reference(copies):
    shape = (2, 3, 8, 64)
    dims, arrays = case(shape, copies)
    got = run_numpy(program(*shape), dims, arrays)["kv_cache"]
    np.testing.assert_array_equal(got, expected(arrays))


def test_launches_cover_the_block_and_only_the_copies_that_there_are():
    def launches(copies, layers):
        kv_cache = DeviceArray(0, (9, layers, 2, 8, 16, 64), DType.BF16)
        block_copies = DeviceArray(0, (copies, 2), DType.I32)
        a = Operands(kv_cache=kv_cache, block_copies=block_copies, act=DType.BF16)
        return op_def("copy_blocks").launches(a, None)

    assert launches(0, 16) == []
    (launch,) = launches(5, 16)
    assert launch.grid == (512 * 1024 // 16 // copy_blocks.VECTORS_PER_BLOCK, 5, 1)
    text = (cuda_src_dir() / "copy_blocks.cu").read_text()
    assert f"kThreads = {copy_blocks.THREADS};" in text
    unroll = copy_blocks.VECTORS_PER_BLOCK // copy_blocks.THREADS
    assert f"kUnroll = {unroll};" in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 8, 64), (3, 3, 16, 64), (5, 2, 64, 128)])
@pytest.mark.parametrize("copies", [0, 1, 13])
def test_kernel(device, shape, copies):
    dims, arrays = case(shape, copies)
    got = run_cuda(device, program(*shape), dims, arrays)["kv_cache"]
    np.testing.assert_array_equal(got, expected(arrays))
