import ctypes

import numpy as np
import pytest

from tinyvllm.driver.kernel import KernelLoader, LoadedKernel, PreparedLaunch, _packing
from tinyvllm.driver.memory import MemPool, copy_to_device, copy_to_host, memset
from tinyvllm.driver.recorder import recording
from tinyvllm.driver.spec import Kernel, TensorMap
from tinyvllm.driver.tensor_map import encode
from tinyvllm.util import DType, InputError

# Reads one box of a matrix and writes it to a box of another, and to `raw` as it lay between.
MOVE = """
#include "tma.cuh"
__global__ void move(int first, const __grid_constant__ TensorMap from,
                     const __grid_constant__ TensorMap to, int row, int col, int to_row,
                     int to_col, int bytes, u32* raw) {
  extern __shared__ __align__(1024) u8 box[];
  __shared__ __align__(8) u64 barrier;
  const u32 b = static_cast<u32>(__cvta_generic_to_shared(&barrier));
  const u32 dst = static_cast<u32>(__cvta_generic_to_shared(box));
  if (threadIdx.x == 0) {
    barrier_init(b, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect(b, bytes);
    tma_load(dst, from, row, col, b);
  }
  barrier_wait(b, 0);
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
    raw[i] = reinterpret_cast<u32*>(box)[i] + first;
  }
  if (threadIdx.x == 0) {
    tma_store(to, to_row, to_col, dst);
    tma_store_commit();
    tma_store_wait<0>();
  }
}
"""
SIGNATURE = (
    "i32 first, map from, map to, i32 row, i32 col, i32 to_row, i32 to_col, i32 bytes, ptr raw"
)
MAP = TensorMap(4096, DType.BF16, rows=100, cols=60, row_stride=64, box_rows=16, box_cols=64)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"ptr": 4104}, "address 0x1008 must be a multiple of 16"),
        ({"row_stride": 60}, "rows 120 bytes apart"),
        ({"cols": 65}, "65 columns in rows 64 apart"),
        ({"rows": 0}, "rows=0"),
        ({"box_rows": 257}, "a box of 257 x 64"),
        ({"swizzle": 48}, "swizzle=48"),
        ({"swizzle": 64}, "box rows of 128 bytes"),
        ({"box_cols": 4}, "box rows of 8 bytes"),
    ],
)
def test_a_map_that_breaks_a_rule_is_refused_by_name(change, named):
    with pytest.raises(InputError, match=named):
        encode(TensorMap(**{**MAP.__dict__, **change}))


def test_a_map_lies_among_the_other_arguments_as_a_whole(monkeypatch):
    image = bytes(range(128))
    monkeypatch.setattr("tinyvllm.driver.kernel.encode", {MAP: image}.__getitem__)
    kernel = Kernel("move.cu", "move", "i32 first, map from, i32 row")
    loaded = LoadedKernel(None, None, 256, 0, 0, *_packing(kernel))
    launch = kernel().launch((1,), 32, first=-5, **{"from": MAP}, row=9)
    block = PreparedLaunch(launch, loaded)._block
    first, middle, row = list(block)[:3]
    assert ctypes.c_int.from_address(first).value == -5
    assert ctypes.string_at(middle, 128) == image
    assert ctypes.c_int.from_address(row).value == 9


@pytest.mark.gpu
@pytest.mark.parametrize("swizzle", [0, 128])
def test_boxes_move_with_zeros_outside(device, stream, tmp_path, swizzle):
    if device.info.compute_capability < (9, 0):
        pytest.skip("TMA needs compute capability 9.0")
    path = tmp_path / "move.cu"
    path.write_text(MOVE)
    kernel = Kernel(str(path), "move", SIGNATURE)()
    rng = np.random.default_rng(1)
    source = rng.integers(1, 2**16, (100, 64), dtype=np.uint16)
    box = 16 * 64 * 2
    with KernelLoader(device) as loader, MemPool(device, 0, max_bytes=32 << 20) as pool:
        from_ptr, to_ptr, raw_ptr = (pool.alloc(n, stream) for n in (source.nbytes, 2 * 4096, box))
        copy_to_device(from_ptr, source, stream)
        memset(to_ptr, 0xFF, 2 * 4096, stream)
        old = TensorMap(from_ptr, DType.BF16, 100, 60, 64, 16, 64, swizzle)
        new = TensorMap(to_ptr, DType.BF16, 30, 56, 64, 16, 64, swizzle)
        args = {"first": 0, "row": 90, "col": 0, "to_row": 20, "to_col": 0, "bytes": box}
        prepared = loader.prepare(
            kernel.launch((1,), 32, smem=box, **{"from": old}, to=new, raw=raw_ptr, **args)
        )
        with recording() as recorder:
            prepared.run(stream)
        shown = recorder.calls[0].args["arguments"]
        assert (shown["from"]["rows"], shown["to"]["ptr"]) == (100, hex(to_ptr))
        raw, moved = np.empty((16, 64), np.uint16), np.empty((64, 64), np.uint16)
        copy_to_host(raw, raw_ptr, stream)
        copy_to_host(moved, to_ptr, stream)
        stream.synchronize()
    expected = np.zeros((16, 64), np.uint16)
    expected[:10, :60] = source[90:, :60]
    if swizzle:  # chunk c of row r lies where chunk c ^ (r % 8) would
        raw = raw.reshape(16, 8, 8)[
            np.arange(16)[:, None], np.arange(8) ^ (np.arange(16) % 8)[:, None]
        ]
        raw = raw.reshape(16, 64)
    assert (raw == expected).all()
    assert (moved[20:30, :56] == expected[:10, :56]).all()
    untouched = np.ones_like(moved, bool)
    untouched[20:30, :56] = False
    assert (moved[untouched] == 0xFFFF).all()
