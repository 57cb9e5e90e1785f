"""What several ops ask of their operands: bytes moved, and how wide their elements are loaded."""

from __future__ import annotations

from math import prod
from typing import Any

from tinyvllm.memory.array import DeviceArray

VECTOR_BYTES = 16  # the widest load and store of a thread


def nbytes(*arrays: Any) -> int:
    """Bytes of the elements of all arrays (device arrays or ndarrays)."""
    return sum(prod(a.shape) * int(a.dtype.itemsize) for a in arrays)


def vector_width(columns: int, *arrays: DeviceArray) -> int:
    """Elements that a thread may load at once from rows of `columns` elements: 16 bytes' worth if
    all rows of all arrays (of one type) start and end on 16 bytes, else 1."""
    width = VECTOR_BYTES // arrays[0].dtype.itemsize
    aligned = columns % width == 0 and all(
        a.ptr % VECTOR_BYTES == 0 and (len(a.shape) < 2 or a.row_stride % width == 0)
        for a in arrays
    )
    return width if aligned else 1
