import logging
import os

import pytest

from tinyvllm.driver.cache import CompiledKernel, KernelCache, Resources, default_directory

KERNEL = CompiledKernel(b"\x7fELF\n\nimage", "_Z1kv", Resources(32, 1024, 0, 0, 0))
PTX = CompiledKernel(b".version 9.0", "_Z1kv", None)


@pytest.mark.parametrize("kernel", [KERNEL, PTX])
def test_round_trip(tmp_path, kernel):
    cache = KernelCache(tmp_path / "new" / "directory")
    assert cache.get("key") is None
    cache.put("key", kernel)
    assert KernelCache(tmp_path / "new" / "directory").get("key") == kernel
    assert len(list(cache.directory.iterdir())) == 1  # no temporary file stays


def test_any_damage_is_noticed(tmp_path):
    cache = KernelCache(tmp_path)
    cache.put("key", KERNEL)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        assert cache.get("key") is None, i
        path.write_bytes(good[:i])
        assert cache.get("key") is None, i
    cache.put("key", KERNEL)
    assert cache.get("key") == KERNEL


def test_unwritable_directory_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file")
    with caplog.at_level(logging.WARNING, "tinyvllm"):
        cache.put("a", KERNEL)
        cache.put("b", KERNEL)
    assert len(caplog.records) == 1 and "TINYVLLM_CACHE_DIR" in caplog.text
    assert cache.get("a") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only directories")
def test_read_only_directory_is_still_read(tmp_path):
    KernelCache(tmp_path).put("a", KERNEL)
    tmp_path.chmod(0o500)
    cache = KernelCache(tmp_path)
    cache.put("b", KERNEL)
    assert cache.get("a") == KERNEL and cache.get("b") is None


def test_directory_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYVLLM_CACHE_DIR", str(tmp_path / "own"))
    assert default_directory() == tmp_path / "own"
    monkeypatch.delenv("TINYVLLM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "tinyvllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "tinyvllm"
