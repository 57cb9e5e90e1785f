"""Random values for dummy weights: made on the device in place, or the same bits with NumPy."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import Kernel, Launch
from tinyvllm.util import DType, ceil_div

RANDOM_FILL = Kernel(
    "random_fill.cu",
    "random_fill_kernel",
    "ptr dst, u32 key, f32 base, f32 scale, u32 num_vectors, u32 row_vectors, "
    "i64 pitch, u32 group, u32 num_parts",
)
THREADS = 256
VECTORS_PER_BLOCK = THREADS * 4

# Values made at a time on the CPU, so that the temporaries stay in its caches. A power of two:
# aligned chunks never straddle a multiple of 2**32.
_CHUNK = 1 << 14
_OFFSETS = np.arange(_CHUNK, dtype=np.uint32)


def dummy_values(key: int, first: int, count: int, base: float, scale: float) -> np.ndarray:
    """float32 values number `first` ... `first + count - 1` of the sequence with this 32-bit key.

    Uniform on the 65536 values base + i * scale, -32768 <= i < 32768. Value number n depends on
    (key, n, base, scale) only and not on what is asked for along with it.
    """
    out = np.empty(count, np.float32)
    start = 0
    while start < count:
        size = min(_CHUNK - (first + start) % _CHUNK, count - start)
        part = out[start : start + size]
        hashes = _hash_indices(key, first + start, size)
        np.copyto(part, hashes.view(np.int32) >> 16, casting="unsafe")
        part *= np.float32(scale)
        part += np.float32(base)
        start += size
    return out


def _hash_indices(key: int, first: int, count: int) -> np.ndarray:
    """uint32 hashes of up to _CHUNK indices: cuda_src/include/hash.cuh describes the mixing."""
    salt = (first >> 32) * 0x9E3779B9 + key * 0x85EBCA6B
    h: np.ndarray = _OFFSETS[:count] + np.uint32(first & 0xFFFFFFFF)
    h ^= np.uint32(key)
    h ^= h >> 16
    h *= np.uint32(0x7FEB352D)
    h += np.uint32(salt & 0xFFFFFFFF)
    h ^= h >> 15
    h *= np.uint32(0x846CA68B)
    return h


def fill_launches(
    dst: int,
    dtype: DType,
    *,
    key: int,
    base: float,
    scale: float,
    num_rows: int,
    row_len: int,
    pitch: int | None = None,
    group: int = 0,
    num_parts: int = 1,
    part: int = 0,
) -> list[Launch]:
    """Launches that write `dummy_values(key, 0, num_rows * row_len, base, scale)`, row by row,
    rounded to `dtype`, to the device address `dst`.

    Rows lie `pitch` elements apart (default: row_len). With `group` > 0 the tensor is number
    `part` of `num_parts` that alternate in groups of that many rows (`Weight.interleave`): row r
    goes to row (r // group) * group * num_parts + part * group + r % group.
    """
    assert 0 <= key < 1 << 32 and 0 <= part < num_parts and (group > 0 or num_parts == 1)
    pitch = row_len if pitch is None else pitch
    if num_parts == 1 and pitch == row_len:  # one long row: more of them are whole vectors
        num_rows, row_len, pitch, group = 1, num_rows * row_len, num_rows * row_len, 1
    group = group or max(num_rows, 1)
    dst += part * group * pitch * dtype.itemsize
    vec = 16 // dtype.itemsize
    if row_len % vec or pitch % vec or dst % 16:
        vec = 1
    row_vectors = row_len // vec
    num_vectors = num_rows * row_vectors
    assert num_vectors < 1 << 32, f"{num_rows} x {row_len} values: too many for one launch"
    if num_vectors == 0:
        return []
    return [
        RANDOM_FILL(dtype, vec).launch(
            (ceil_div(num_vectors, VECTORS_PER_BLOCK),),
            THREADS,
            dst=dst,
            key=key,
            base=base,
            scale=scale,
            num_vectors=num_vectors,
            row_vectors=row_vectors,
            pitch=pitch,
            group=group,
            num_parts=num_parts,
        )
    ]
