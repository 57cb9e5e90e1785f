"""What the interpreter of the engine's process runs."""

import sys

from tinyvllm.api import engine_loop
from tinyvllm.api.engine_process import program
from tinyvllm.config import EngineConfig
from tinyvllm.driver import device


def test_the_driver_starts_before_the_engine_is_imported(monkeypatch):
    ran = []
    monkeypatch.setattr(device, "open_ahead", lambda *args: ran.append(("open_ahead", *args)))
    monkeypatch.setattr(engine_loop, "main", lambda *args: ran.append(("main", *args)))
    for options, opened in (
        ({"device": "cuda:1", "kernel_path": "portable"}, (1, "portable")),
        ({"device": "auto"}, (0, "auto")),
        ({"device": "cpu"}, (None, "auto")),
    ):
        monkeypatch.setattr(sys, "path", ["working directory", *sys.path])
        exec(program(EngineConfig(**options), 5, 6), {})
        assert ran == [("open_ahead", *opened), ("main", 5, 6)]
        assert "working directory" not in sys.path
        ran.clear()
