"""Parse the head of a GGUF file: metadata and tensor descriptions, every size checked.

The gguf package's own reader takes seconds for a vocabulary and trusts the file's counts; only its
block formats (sizes and dequantisation) are used.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tinyvllm.util import InputError, align_up

_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    _FLOAT32: "<f4", _BOOL: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_DIMS = 4
_MIN_TENSOR_INFO = 32  # bytes of a description with an empty name and one dimension
_MIN_KEY_VALUE = 13


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the file describes it; `shape` is row-major, `offset` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    quantization: Any  # gguf.GGMLQuantizationType
    block_size: int  # elements of a block
    block_bytes: int
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """The parsed head of a file: metadata by key, tensors by their GGUF name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def parse(cls, path: Path | str) -> GgufFile:
        """InputError if the file is truncated or contradicts itself, or gguf is not installed."""
        path = Path(path)
        try:
            with open(path, "rb", buffering=1 << 20) as file:
                return _Parser(path, file).parse()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A metadata value of type `kind`, or `default` if the key is absent."""
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        # An exact type: True must not pass for 1.
        if type(value) is not kind:
            raise InputError(
                f"{self.path}: {key} is of type {type(value).__name__}: must be {kind.__name__}"
            )
        return value


def import_gguf() -> Any:
    """The optional gguf package, or an InputError that says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise InputError("GGUF files need the gguf package: pip install gguf") from error
    return gguf


class _Parser:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.gguf = import_gguf()
        self.path = path
        self.file = file
        self.left = os.fstat(file.fileno()).st_size
        self.size = self.left

    def parse(self) -> GgufFile:
        if self.left < 24 or self.bytes(4) != b"GGUF":
            raise self.error("does not begin like a GGUF file")
        version = self.unpack("<I")
        if version not in (2, 3):
            raise self.error(f"version {version}: must be 2 or 3 (little-endian)")
        num_tensors = self.count("tensors", _MIN_TENSOR_INFO)
        num_keys = self.count("metadata keys", _MIN_KEY_VALUE)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.error(f"metadata key {key!r} stands there twice")
            metadata[key] = self.value(key, self.unpack("<I"))
        infos = [self.tensor_info() for _ in range(num_tensors)]

        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise self.error(f"general.alignment={alignment!r}: must be from 1 to {1 << 20}")
        data_start = align_up(self.size - self.left, alignment)
        tensors: dict[str, GgufTensor] = {}
        for name, dims, type_id, offset in infos:
            if name in tensors:
                raise self.error(f"tensor {name!r} stands there twice")
            tensors[name] = self.tensor(name, dims, type_id, data_start + offset)
        return GgufFile(self.path, metadata, tensors)

    def tensor(self, name: str, dims: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        try:
            quantization = self.gguf.GGMLQuantizationType(type_id)
        except ValueError as error:
            raise self.error(f"tensor {name!r} has the unknown type {type_id}") from error
        block_size, block_bytes = self.gguf.GGML_QUANT_SIZES[quantization]
        if 0 in dims or dims[0] % block_size:
            raise self.error(
                f"tensor {name!r} of type {quantization.name} has dimensions {list(dims)}: must be "
                f"above 0, the first a multiple of {block_size}"
            )
        num_bytes = math.prod(dims) // block_size * block_bytes
        if offset + num_bytes > self.size:
            raise self.error(
                f"tensor {name!r} of type {quantization.name} and dimensions {list(dims)} ends at "
                f"byte {offset + num_bytes}, the file at {self.size}"
            )
        return GgufTensor(name, dims[::-1], quantization, block_size, block_bytes, offset)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.error(f"tensor {name!r} has {num_dims} dimensions: must be 1 to {_MAX_DIMS}")
        dims = struct.unpack(f"<{num_dims}Q", self.bytes(8 * num_dims))
        return name, dims, self.unpack("<I"), self.unpack("<Q")

    def value(self, key: str, type_id: int) -> Any:
        """A metadata value as Python's own type; arrays become lists."""
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            item_type = self.unpack("<I")
            if item_type == _STRING:
                return [self.string() for _ in range(self.count(key, 8))]
            if item_type in _SCALARS:
                dtype = np.dtype(_SCALARS[item_type])
                data = self.bytes(self.count(key, dtype.itemsize) * dtype.itemsize)
                return np.frombuffer(data, dtype).tolist()
            raise self.error(f"{key} is an array of the unsupported type {item_type}")
        if type_id not in _SCALARS:
            raise self.error(f"{key} has the unknown type {type_id}")
        dtype = np.dtype(_SCALARS[type_id])
        value = np.frombuffer(self.bytes(dtype.itemsize), dtype)[0]
        # The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06.
        return float(str(value)) if type_id == _FLOAT32 else value.item()

    def count(self, what: str, min_bytes: int) -> int:
        """A number of items, each of at least `min_bytes`, that the rest of the file can hold."""
        count: int = self.unpack("<Q")
        if count * min_bytes > self.left:
            raise self.error(f"{what}: {count} of them do not fit into {self.left} bytes")
        return count

    def string(self) -> str:
        data = self.bytes(int.from_bytes(self.bytes(8), "little"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the string {data[:40]!r} is not UTF-8") from error

    def unpack(self, fmt: str) -> Any:
        return struct.unpack(fmt, self.bytes(struct.calcsize(fmt)))[0]

    def bytes(self, count: int) -> bytes:
        # Checked before the read, so that a lying length allocates nothing.
        if count > self.left:
            raise self.error(f"wants {count} bytes at {self.size - self.left}, ends at {self.size}")
        self.left -= count
        return self.file.read(count)

    def error(self, text: str) -> InputError:
        return InputError(f"{self.path}: {text}")
