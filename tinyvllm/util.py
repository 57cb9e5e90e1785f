"""Small helpers that every layer uses: integer arithmetic, texts, element types, the input error.

This module imports nothing else of the package, so that the layers above stay acyclic.
"""

from __future__ import annotations

import enum
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

logger = logging.getLogger("tinyvllm")
start_logger = logging.getLogger("tinyvllm.start")  # of its own, so that it can be silenced
START_PREFIX = "start: "  # of lines that `log_start` writes


class InputError(ValueError):
    """Bad input from a person: an option, a file or a request.

    The message names what is wrong, the value and the limit; the command line prints it without
    a traceback.
    """


def log_start(part: str) -> None:
    """Logs that a part of the start has just ended: `tinyvllm bench startup` times these lines."""
    start_logger.info("%s%s", START_PREFIX, part)


class Closing:
    """A context manager around `close()`, which may be called more than once."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The garbage collector leaves alone what exists now, until the end of the block.

    A round over all that an application holds takes tens of milliseconds, in which a device has
    nothing to do. Where something is frozen already, whoever did that has decided.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """The block, which makes much and keeps it, is not interrupted by garbage collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is >= value."""
    return ceil_div(value, alignment) * alignment


def format_bytes(num_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number >= 1, e.g. '1.50 GiB'."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def short_repr(value: object) -> str:
    """repr(value) for an error message: at most 80 characters, the rest cut off."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class DType(enum.Enum):
    """Element type of a buffer. `storage` is the NumPy dtype that holds its bits.

    NumPy has no bfloat16: its values travel as uint16 (the upper half of a float32).
    """

    BF16 = "bfloat16"
    FP16 = "float16"
    F32 = "float32"
    I32 = "int32"

    @property
    def storage(self) -> np.dtype:
        return _STORAGE[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.storage.itemsize

    def round(self, values: np.ndarray) -> np.ndarray:
        """float32 values rounded to this type, again as float32 (what the CPU computes with)."""
        return self.decode(self.encode(values))

    def encode(self, values: np.ndarray) -> np.ndarray:
        """float32 values -> this type's storage, rounded to nearest even."""
        if self is DType.BF16:
            return float32_to_bf16(values)
        return np.asarray(values).astype(self.storage)

    def decode(self, bits: np.ndarray) -> np.ndarray:
        """This type's storage -> float32 (int32 stays as it is)."""
        if self is DType.BF16:
            return bf16_to_float32(bits)
        return bits if self is DType.I32 else bits.astype(np.float32)


_STORAGE: dict[DType, np.dtype[Any]] = {
    DType.BF16: np.dtype(np.uint16),
    DType.FP16: np.dtype(np.float16),
    DType.F32: np.dtype(np.float32),
    DType.I32: np.dtype(np.int32),
}


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 bits -> float32, exact."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def float32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits (uint16), round to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    # Adding 0x7fff plus the lowest kept bit rounds halves to even; it would carry a NaN's
    # payload into infinity or a sign flip, so NaNs are set to the quiet NaN of bfloat16.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded
