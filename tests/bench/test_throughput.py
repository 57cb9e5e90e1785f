"""What `bench throughput` prints, on a device that does nothing."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tinyvllm.bench import throughput
from tinyvllm.bench.floors import Rates
from tinyvllm.bench.host import NullBackend
from tinyvllm.bench.loads import Load, LoadRequest
from tinyvllm.bench.throughput import Setting, bench_throughput, make_loads
from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.util import InputError

CONFIG = EngineConfig(model="llama-3.2-1b", load_format="dummy")
REQUESTS = [LoadRequest([1, 2, 3], 4), LoadRequest([5] * 40, 2)]
SMALL = Load("small", REQUESTS, 0.5, (("another engine, 2026-11-29", 100.0),))


@pytest.fixture
def null_gpu(monkeypatch):
    """The options of the engines that are opened."""
    opened = []

    def open_llm(**options):
        opened.append(options)
        config = EngineConfig(**options)
        backend = NullBackend(config, config.max_num_seqs)
        return nullcontext(SimpleNamespace(engine=LLMEngine(config, backend=backend)))

    monkeypatch.setattr(throughput, "LLM", open_llm)
    monkeypatch.setattr(throughput, "cuda_unavailable", lambda: None)
    monkeypatch.setattr(throughput, "device_rates", lambda config: ("a card", Rates(4e12, 7e14)))
    return opened


def test_as_json_each_run_of_each_setting_is_a_row(null_gpu, capsys):
    settings = [Setting(8, 64), Setting(4, 32)]
    bench_throughput(CONFIG, [SMALL], settings, runs=2, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["rivals"] == {"small": {"another engine, 2026-11-29": 100.0}}
    rows = found["rows"]
    assert [(r["max_num_seqs"], r["max_num_batched_tokens"], r["run"]) for r in rows] == [
        (8, 64, 0),
        (8, 64, 1),
        (4, 32, 0),
        (4, 32, 1),
    ]
    for row in rows:
        assert (row["num_requests"], row["num_output_tokens"]) == (2, 6)
        assert row["ratio"] == row["seconds"] / row["floor_s"] > 0
        assert set(row["tbt"]) == {"p50", "p99", "max"}
    # No run found its prompts in the prefix cache.
    assert [row["num_prompt_steps"] for row in rows] == [1, 1, 2, 2]
    assert [options["max_model_len"] for options in null_gpu] == [42, 42]


def test_table_has_a_line_for_each_run_below_what_the_load_is(null_gpu, capsys):
    bench_throughput(CONFIG, [SMALL], [Setting(8, 64)], runs=1, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "small: 2 requests, 43 tokens in, 6 out, temperature 0.5"
    assert lines[2].split(": ") == ["    another engine, 2026-11-29", "100 output tokens/s"]
    assert len(lines[3]) == len(lines[4])
    assert lines[4].split()[:4] == ["small", "8", "64", "0"]


def test_it_needs_a_gpu_and_at_least_one_run(null_gpu, monkeypatch):
    with pytest.raises(InputError, match="runs=0"):
        bench_throughput(CONFIG, [SMALL], [Setting(8, 64)], runs=0, as_json=True)
    monkeypatch.setattr(throughput, "cuda_unavailable", lambda: "there is none")
    with pytest.raises(InputError, match="bench throughput needs a GPU: there is none"):
        bench_throughput(CONFIG, [SMALL], [Setting(8, 64)], runs=1, as_json=True)


def test_loads_are_made_by_name_for_the_models_vocabulary():
    (load,) = make_loads(CONFIG, ["nano-vllm"], 0)
    assert load.num_output_tokens == 133966
