"""Where weights come from: the interface that every reader of a checkpoint offers the loader."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tinyvllm.util import DType, InputError


class TensorSource(Protocol):
    """Named tensors (Hugging Face names) that can be read in pieces, from several threads."""

    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; InputError if there is none of that name."""
        ...

    def read(self, name: str, dtype: DType, out: np.ndarray, start: int = 0) -> None:
        """Fill `out` with the elements from `start` on of the flattened row-major tensor.

        `out`: [count], C-contiguous, of `dtype.storage`; the values are rounded to `dtype`.
        Thread-safe. InputError if the file breaks its promises or a value does not fit `dtype`.
        """
        ...

    def close(self) -> None:
        """Close the files; reading afterwards is an error."""
        ...


def missing_tensor(source: str, name: str) -> InputError:
    """The error for a tensor that a checkpoint lacks."""
    return InputError(f"{source}: no tensor named {name!r}")


def check_span(name: str, size: int, dtype: DType, out: np.ndarray, start: int) -> None:
    """Assert that `out` is what `read` asks for and lies inside a tensor of `size` elements."""
    assert out.ndim == 1 and out.flags.c_contiguous and out.dtype == dtype.storage, name
    assert start >= 0 and start + out.size <= size, f"{name}: {start}+{out.size} of {size}"


def store(source: str, name: str, values: np.ndarray, dtype: DType, out: np.ndarray) -> None:
    """Write float32 `values` to `out`, rounded to `dtype`.

    InputError if float16 cannot hold a value: an infinite weight would only show as NaN logits.
    """
    with np.errstate(over="ignore"):
        out[:] = dtype.encode(values)
    if dtype is DType.FP16 and np.isinf(out).any():
        largest = float(np.abs(values).max())
        raise InputError(
            f"{source}: tensor {name!r} holds {largest:g}, float16 ends at 65504; "
            "use dtype='bfloat16'"
        )
