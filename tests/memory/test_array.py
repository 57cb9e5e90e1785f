import pytest

from tinyvllm.memory.array import DeviceArray
from tinyvllm.util import DType


def test_size_and_bytes():
    array = DeviceArray(4096, (3, 5), DType.BF16)
    assert (array.size, array.nbytes, array.row_stride) == (15, 30, 5)
    assert array.contiguous
    assert DeviceArray(0, (), DType.F32).nbytes == 4


def test_columns_keep_the_row_stride():
    array = DeviceArray(4096, (3, 8), DType.F32)
    view = array.columns(2, 4)
    assert (view.ptr, view.shape, view.row_stride) == (4096 + 8, (3, 4), 8)
    assert not view.contiguous
    again = view.columns(1, 2)
    assert (again.ptr, again.row_stride) == (4096 + 12, 8)


def test_rows_step_by_the_row_stride():
    view = DeviceArray(4096, (6, 8), DType.BF16).columns(4, 4).rows(2, 3)
    assert (view.ptr, view.shape, view.row_stride) == (4096 + 8 + 2 * 16, (3, 4), 8)


@pytest.mark.parametrize("start, width", [(-1, 2), (0, 0), (7, 2)])
def test_views_stay_inside(start, width):
    with pytest.raises(AssertionError):
        DeviceArray(0, (3, 8), DType.F32).columns(start, width)
