"""A typed view of device memory: where it is, its shape and type, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinyvllm.util import DType


@dataclass(frozen=True)
class DeviceArray:
    """Elements of `dtype` at device address `ptr`, row-major; it does not own the memory.

    Rows are what the last axis spans. They start `row_stride` elements apart (0, the default:
    one directly after the other). The memory has room for `max_rows` along the first axis (0: no
    more than `shape` has), whatever lies in those beyond.
    """

    ptr: int
    shape: tuple[int, ...]
    dtype: DType
    row_stride: int = 0
    max_rows: int = 0

    def __post_init__(self) -> None:
        if self.row_stride == 0:
            object.__setattr__(self, "row_stride", self.shape[-1] if self.shape else 1)
        if self.max_rows == 0:
            object.__setattr__(self, "max_rows", self.shape[0] if self.shape else 1)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without the gaps between rows."""
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        return not self.shape or self.row_stride == self.shape[-1] or self.size == self.shape[-1]

    def columns(self, start: int, width: int) -> DeviceArray:
        """The view of `width` elements of each row, from `start` on."""
        assert start >= 0 and width > 0 and start + width <= self.shape[-1], (start, width, self)
        ptr = self.ptr + start * self.dtype.itemsize
        shape = (*self.shape[:-1], width)
        return DeviceArray(ptr, shape, self.dtype, self.row_stride, self.max_rows)

    def rows(self, start: int, count: int) -> DeviceArray:
        """The view of `count` rows of a 2-D array, from `start` on."""
        assert len(self.shape) == 2, self.shape
        assert start >= 0 and count > 0 and start + count <= self.shape[0], (start, count, self)
        ptr = self.ptr + start * self.row_stride * self.dtype.itemsize
        shape = (count, self.shape[1])
        return DeviceArray(ptr, shape, self.dtype, self.row_stride, self.max_rows - start)
