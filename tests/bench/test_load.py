"""What `bench load` refuses, and what it shows."""

import logging

import pytest

from tinyvllm.bench import load
from tinyvllm.bench.load import bench_load
from tinyvllm.config import EngineConfig
from tinyvllm.util import InputError, log_start, logger, start_logger


def test_load_measures_presets_only():
    with pytest.raises(InputError, match=r"must be one of llama-3\.2-1b"):
        bench_load(EngineConfig(model="other"))


def test_only_the_weights_are_shown(monkeypatch, caplog):
    def opened(*_):
        log_start("weights")
        logger.info("weights: 2.30 GiB in 0.08 s")
        return load.tempfile.SpooledTemporaryFile()  # something to close

    for name in ("write_checkpoint", "resolve_model"):
        monkeypatch.setattr(load, name, lambda *_: None)
    monkeypatch.setattr(load, "open_backend", opened)
    levels = [(one, one.level) for one in (logging.getLogger(), start_logger)]
    try:
        bench_load(EngineConfig(model="llama-3.2-1b"))
    finally:
        for one, level in levels:
            one.setLevel(level)
    assert caplog.messages == ["weights: 2.30 GiB in 0.08 s"] * 2
