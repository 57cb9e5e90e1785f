"""The floors that benchmarks print, and Python's time on a device that does nothing."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tinyvllm import bench
from tinyvllm.config import EngineConfig
from tinyvllm.model.presets import PRESETS
from tinyvllm.util import InputError

MODEL = PRESETS["llama-3.2-1b"]
DUMMY = EngineConfig(model="llama-3.2-1b", load_format="dummy")


def test_floor_of_a_small_batch_is_the_weights_and_the_kv_cache():
    num_bytes, seconds = bench.step_floor(MODEL, 16, 1, 4096, 4e12, 800e12)
    weights, kv = 2.4715e9, 4096 * 32768
    assert num_bytes == pytest.approx(weights + kv, rel=0.003)
    assert seconds == pytest.approx(num_bytes / 4e12, rel=1e-3)


def test_floor_of_a_large_batch_is_the_products_and_the_kv_cache():
    _, seconds = bench.step_floor(MODEL, 16, 256, 256, 4.25e12, 780e12)
    products, kv = 256 * 2.47e9 / 780e12, 256 * 256 * 32768 / 4.25e12
    assert seconds == pytest.approx(products + kv, rel=0.1)


@pytest.mark.parametrize("name", ["NVIDIA H200", "a card"])
def test_latency_as_json_holds_the_table(monkeypatch, capsys, name):
    """On a GPU that is not there: only what is printed from the measured times."""
    monkeypatch.setattr(bench, "cuda_unavailable", lambda: None)
    monkeypatch.setattr(
        bench, "Device", lambda index: nullcontext(SimpleNamespace(info=SimpleNamespace(name=name)))
    )
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 4e12)
    engine = SimpleNamespace(model=SimpleNamespace(config=MODEL))
    monkeypatch.setattr(bench, "LLM", lambda **_: nullcontext(SimpleNamespace(engine=engine)))
    monkeypatch.setattr(bench, "_decode_times", lambda engine, batch, context: (2e-3, 1e-4))
    bench.bench_latency(DUMMY, [1, 4], [256], as_json=True, host=False)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    result = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert result["device"] == name
    assert result["matmul_tflops"] == (780 if name == "NVIDIA H200" else None)
    assert [(r["batch"], r["context"], r["ms"]) for r in result["rows"]] == [
        (1, 256, 2.0),
        (4, 256, 2.0),
    ]
    bench.bench_latency(DUMMY, [4], [256], as_json=False, host=True)
    table = capsys.readouterr().out.splitlines()
    assert table[1].endswith("us/row")
    assert table[2].split()[-1] == "25.00"


def test_host_prints_a_line_for_each_batch(capsys):
    bench.bench_host(DUMMY, [1, 4])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 1", "batch 4"]


def test_load_measures_presets_only():
    with pytest.raises(InputError, match=r"must be one of llama-3\.2-1b"):
        bench.bench_load(EngineConfig(model="other"))
