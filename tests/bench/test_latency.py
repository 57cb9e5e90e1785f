"""What `bench latency` prints from its measured times."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tinyvllm.bench import floors, latency
from tinyvllm.config import EngineConfig
from tinyvllm.model.presets import PRESETS

MODEL = PRESETS["llama-3.2-1b"]
DUMMY = EngineConfig(model="llama-3.2-1b", load_format="dummy")


@pytest.mark.parametrize("name", ["NVIDIA H200", "a card"])
def test_latency_as_json_holds_the_table(monkeypatch, capsys, name):
    """On a GPU that is not there: only what is printed from the measured times."""
    monkeypatch.setattr(latency, "cuda_unavailable", lambda: None)
    device = nullcontext(SimpleNamespace(info=SimpleNamespace(name=name)))
    monkeypatch.setattr(floors, "Device", lambda index: device)
    monkeypatch.setattr(floors, "copy_bandwidth", lambda device: 4e12)
    engine = SimpleNamespace(model=SimpleNamespace(config=MODEL))
    monkeypatch.setattr(latency, "LLM", lambda **_: nullcontext(SimpleNamespace(engine=engine)))
    monkeypatch.setattr(latency, "decode_times", lambda *args, **kwargs: (2e-3, 1e-4))
    monkeypatch.setattr(latency, "graph_seconds", lambda engine, batch, context, settle: 1.6e-3)
    latency.bench_latency(DUMMY, [1, 4], [256], as_json=True, host=False)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    result = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert result["device"] == name
    assert result["matmul_tflops"] == (780 if name == "NVIDIA H200" else None)
    assert [(r["batch"], r["context"], r["ms"]) for r in result["rows"]] == [
        (1, 256, 2.0),
        (4, 256, 2.0),
    ]
    latency.bench_latency(DUMMY, [4], [256], as_json=False, host=True)
    table = capsys.readouterr().out.splitlines()
    assert table[1].endswith("us/row")
    assert table[2].split()[2:5] == ["2.000", "1.600", "1.250"]
    assert table[2].split()[-1] == "25.00"
