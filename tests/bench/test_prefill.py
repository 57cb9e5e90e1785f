"""What `bench prefill` measures and prints, on a device that does nothing."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tinyvllm.bench import prefill
from tinyvllm.bench.floors import Rates
from tinyvllm.bench.host import NullBackend
from tinyvllm.bench.prefill import bench_prefill
from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.util import InputError

CONFIG = EngineConfig(model="llama-3.2-1b", load_format="dummy", max_num_seqs=4)


@pytest.fixture
def engines(monkeypatch):
    opened = []

    def open_llm(**options):
        config = EngineConfig(**options)
        engine = LLMEngine(config, backend=NullBackend(config, config.max_num_seqs))
        opened.append(engine)
        return nullcontext(SimpleNamespace(engine=engine))

    monkeypatch.setattr(prefill, "LLM", open_llm)
    monkeypatch.setattr(prefill, "cuda_unavailable", lambda: None)
    monkeypatch.setattr(prefill, "device_rates", lambda config: ("a card", Rates(4e12, 7e14)))
    return opened


def test_each_shape_is_run_in_chunks_of_each_size(engines, monkeypatch, capsys):
    chunks = []
    measure = prefill.measure

    def watched(engine, load, shown):
        result = measure(engine, load, shown=shown)
        chunks.append(max(one.num_tokens for one in result.work))
        assert len(result.work) == len(load.requests) * len(load.requests[0].prompt) / chunks[-1]
        return result

    monkeypatch.setattr(prefill, "measure", watched)
    shapes = [(1, 512), (8, 64)]
    bench_prefill(CONFIG, shapes, [128, 256], runs=1, ops=False, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(r["prompts"], r["length"], r["chunk"]) for r in found["rows"]] == [
        (1, 512, 128),
        (1, 512, 256),
        (8, 64, 128),
        (8, 64, 256),
    ]
    assert chunks == [128] * 3 + [256] * 3 + [128] * 3 + [256] * 3
    row = found["rows"][0]
    assert row["tokens_per_s"] == pytest.approx(512 / row["ms"] * 1e3)
    assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
    assert engines[0].config.max_num_seqs == 8


def test_table_names_the_rivals_of_the_shapes_that_have_some(engines, capsys):
    bench_prefill(CONFIG, [(1, 64)], [64], runs=1, ops=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[:3] == ["1", "64", "64"]
    prefill._print_rows([prefill.PrefillRow(1, 8192, 8192, 40.0, 27.0, 1.48, 204800.0, 1.0)])
    assert "1 x 8192: PyTorch 2.11, H200, 2026-11-29: 217000 tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "shapes, chunks, runs, named",
    [
        ([(0, 8)], [8], 1, "prompts=0"),
        ([(1, 0)], [8], 1, "length=0"),
        ([(1, 8)], [0], 1, "chunk=0"),
        ([(1, 8)], [8], 0, "runs=0"),
    ],
)
def test_sizes_that_cannot_be_measured_are_named(shapes, chunks, runs, named):
    with pytest.raises(InputError, match=named):
        bench_prefill(CONFIG, shapes, chunks, runs=runs, ops=False, as_json=True)
