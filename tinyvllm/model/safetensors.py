"""Read a checkpoint of one or several safetensors files, straight from the file into the buffer."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tinyvllm.model.config import read_json
from tinyvllm.model.source import check_span, missing_tensor, store
from tinyvllm.util import DType, InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_DTYPES = {"BF16": DType.BF16, "F16": DType.FP16, "F32": DType.F32}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB - 4096 in one call
_CHUNK = 1 << 18  # elements converted at a time: the temporaries stay in the L2 cache


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies: `offset` is in bytes from the start of the file."""

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class SafetensorsSource:
    """TensorSource over the safetensors files of a directory in Hugging Face layout.

    Opening reads the headers only. InputError for a file that is truncated or contradicts itself
    or the index, and for element types other than bfloat16, float16 and float32.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        self._tensors: dict[str, _Tensor] = {}
        self._fds: dict[Path, int] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, dtype: DType, out: np.ndarray, start: int = 0) -> None:
        tensor = self._tensor(name)
        check_span(name, tensor.size, dtype, out, start)
        offset = tensor.offset + start * tensor.dtype.itemsize
        if tensor.dtype is dtype:
            self._read_bytes(name, tensor, offset, out)
            return
        raw = np.empty(min(_CHUNK, out.size), tensor.dtype.storage)
        for begin in range(0, out.size, _CHUNK):
            piece = out[begin : begin + _CHUNK]
            bits = raw[: piece.size]
            self._read_bytes(name, tensor, offset + begin * tensor.dtype.itemsize, bits)
            store(str(tensor.path), name, tensor.dtype.decode(bits), dtype, piece)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise missing_tensor(str(self._directory), name)
        return self._tensors[name]

    def _read_bytes(self, name: str, tensor: _Tensor, offset: int, out: np.ndarray) -> None:
        """Fill `out` from the file; preadv needs no lock and lets other threads run."""
        view = out.data.cast("B") if out.size else memoryview(b"")
        done = 0
        while done < len(view):
            part = view[done : done + _MAX_READ_BYTES]
            count = os.preadv(self._fds[tensor.path], [part], offset + done)
            if count == 0:
                raise InputError(
                    f"{tensor.path}: ends at byte {offset + done}, inside tensor {name!r}"
                )
            done += count

    def _open(self) -> None:
        index = self._directory / INDEX_FILE
        if (self._directory / SINGLE_FILE).is_file():
            self._add_file(self._directory / SINGLE_FILE)
        elif index.exists():
            self._add_shards(index)
        else:
            raise InputError(
                f"{self._directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "weights are read from safetensors files only"
            )

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: weight_map must be an object that maps tensors to files")
        for name, file in weight_map.items():
            # Only a plain name, so that an index cannot point outside its directory.
            if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
                raise InputError(
                    f"{index}: tensor {name!r}: {file!r} is not the name of a safetensors file"
                )
        for file in sorted(set(weight_map.values())):
            path = self._directory / file
            if not path.is_file():
                raise InputError(f"{index}: names {file!r}, which does not exist")
            self._add_file(path)
        for name, file in weight_map.items():
            if name not in self._tensors or self._tensors[name].path.name != file:
                raise InputError(f"{index}: {file!r} does not hold tensor {name!r}")
        for name, tensor in self._tensors.items():
            if name not in weight_map:
                raise InputError(f"{index}: does not list {name!r}, which {tensor.path} holds")

    def _add_file(self, path: Path) -> None:
        try:
            self._fds[path] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{path}: cannot be opened: {error.strerror}") from error
        for name, tensor in _read_header(path).items():
            if name in self._tensors:
                other = self._tensors[name].path
                raise InputError(f"{path}: tensor {name!r} stands in {other} too")
            self._tensors[name] = tensor


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Every tensor of one file. safetensors' own parser validates first; it hides the offsets."""
    file_size = path.stat().st_size
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if file_size < 8 or header_size > min(_MAX_HEADER_BYTES, file_size - 8):
            raise InputError(
                f"{path}: a header of {header_size} bytes does not fit: the file has {file_size} "
                f"bytes, a header at most {_MAX_HEADER_BYTES}"
            )
        header = file.read(header_size)
    try:
        with safe_open(path, framework="numpy"):
            pass
        entries = json.loads(header, object_pairs_hook=_unique)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a valid safetensors file: {error}") from error

    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise InputError(
                f"{path}: tensor {name!r} has type {entry['dtype']}: "
                f"must be one of {', '.join(_DTYPES)}"
            )
        start, end = entry["data_offsets"]
        offset = 8 + header_size + start
        tensor = _Tensor(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), offset)
        if end - start != tensor.size * tensor.dtype.itemsize or offset + end - start > file_size:
            raise InputError(
                f"{path}: tensor {name!r} of shape {list(tensor.shape)} claims bytes "
                f"{start} to {end}, the file has {file_size - 8 - header_size} bytes of data"
            )
        tensors[name] = tensor
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different: two parsers could take different twins."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands there twice")
    return result
