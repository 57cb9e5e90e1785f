"""The disk cache of compiled kernels: one checksummed file for each, written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tinyvllm.util import logger

SCHEMA = 1  # part of every key: raise it when the file format or its meaning changes


@dataclass(frozen=True)
class Resources:
    """What a kernel uses, as the assembler reported it; bytes unless said otherwise."""

    registers: int  # of a thread
    static_smem: int  # of a block
    stack: int  # of a thread, like the spills
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code (cubin; PTX text for an architecture that NVRTC does not know).

    `lowered_name` is the symbol in `image`; `resources` is None for PTX, which is not assembled.
    """

    image: bytes
    lowered_name: str
    resources: Resources | None


def default_directory() -> Path | None:
    """TINYVLLM_CACHE_DIR, else tinyvllm/ in XDG_CACHE_HOME or ~/.cache; None without a home."""
    if explicit := os.environ.get("TINYVLLM_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tinyvllm" if os.path.isabs(base) else None


class KernelCache:
    """Compiled kernels by key, in `directory` (default: `default_directory()`).

    A directory that cannot be written is warned about once, and then only read.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()
        self._writable = self.directory is not None

    def _path(self, key: str) -> Path | None:
        return self.directory / f"{key}.kernel" if self.directory else None

    def get(self, key: str) -> CompiledKernel | None:
        """The kernel stored under `key`; None if there is none or its file is damaged."""
        path = self._path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:  # not there, or not readable: compile instead
            return None
        checksum, _, content = data.partition(b"\n")
        if checksum != _checksum(content):
            logger.warning("kernel cache: %s is damaged and will be compiled again", path)
            return None
        header, _, image = content.partition(b"\n")
        fields = json.loads(header)
        resources = Resources(**fields["resources"]) if fields["resources"] else None
        return CompiledKernel(image, fields["lowered_name"], resources)

    def put(self, key: str, kernel: CompiledKernel) -> None:
        """Stores a kernel; other processes see all of the file or nothing."""
        path = self._path(key)
        if path is None or not self._writable:
            return
        header = {
            "lowered_name": kernel.lowered_name,
            "resources": asdict(kernel.resources) if kernel.resources else None,
        }
        content = json.dumps(header).encode() + b"\n" + kernel.image
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(path, _checksum(content) + b"\n" + content)
        except OSError as error:
            self._writable = False
            logger.warning(
                "kernel cache: %s cannot be written (%s); kernels will be compiled at each start. "
                "Set TINYVLLM_CACHE_DIR to a writable directory.",
                path.parent,
                error.strerror,
            )


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _write_atomically(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
