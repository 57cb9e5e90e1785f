"""Bytes of operands and the width of their loads."""

import numpy as np
import pytest

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.arrays import nbytes, vector_width
from tinyvllm.util import DType


def test_nbytes_counts_elements_of_both_kinds_of_array():
    view = DeviceArray(0, (3, 8), DType.BF16, row_stride=100)
    assert nbytes(view, np.zeros((2, 5), np.float32)) == 3 * 8 * 2 + 2 * 5 * 4


@pytest.mark.parametrize(
    ("ptr", "columns", "stride", "dtype", "width"),
    [
        (0, 576, 576, DType.BF16, 8),
        (32, 64, 192, DType.FP16, 8),
        (0, 64, 64, DType.F32, 4),
        (0, 577, 577, DType.BF16, 1),  # rows end off 16 bytes
        (0, 64, 100, DType.BF16, 1),  # the second row starts off 16 bytes
        (8, 64, 64, DType.BF16, 1),  # the first row does
    ],
)
def test_vector_width(ptr, columns, stride, dtype, width):
    array = DeviceArray(ptr, (4, columns), dtype, row_stride=stride)
    good = DeviceArray(0, (4, columns), dtype)
    assert vector_width(columns, good, array) == width
