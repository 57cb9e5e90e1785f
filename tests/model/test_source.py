"""store: rounding, and values that float16 cannot hold."""

import numpy as np
import pytest

from tinyvllm.model.source import missing_tensor, store
from tinyvllm.util import DType, InputError


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.F32])
def test_store_rounds(dtype: DType) -> None:
    values = np.array([1.0, 1 / 3, -65504.0, 1e-3], np.float32)
    out = np.empty(4, dtype.storage)
    store("file", "t", values, dtype, out)
    np.testing.assert_array_equal(out, dtype.encode(values))


def test_float16_overflow() -> None:
    values = np.array([0.0, -7e4], np.float32)
    with pytest.raises(InputError, match="file: tensor 't' holds 70000, float16 ends at 65504"):
        store("file", "t", values, DType.FP16, np.empty(2, np.float16))
    store("file", "t", values, DType.BF16, np.empty(2, np.uint16))


def test_missing_tensor_names_file_and_tensor() -> None:
    assert "file: no tensor named 't'" in str(missing_tensor("file", "t"))
