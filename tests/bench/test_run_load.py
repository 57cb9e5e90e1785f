"""Loads through the engine on a device that does nothing, and through a small model on the CPU."""

import pytest

from tinyvllm.bench import run_load as module
from tinyvllm.bench.host import NullBackend
from tinyvllm.bench.loads import Load, LoadRequest
from tinyvllm.bench.run_load import Percentiles, run_load
from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine

CONFIG = EngineConfig(
    model="llama-3.2-1b", load_format="dummy", max_num_seqs=256, max_num_batched_tokens=256
)


@pytest.fixture
def engine():
    opened = LLMEngine(CONFIG, backend=NullBackend(CONFIG, 256))
    yield opened
    opened.close()


def load(*requests):
    prompts = [[i] * n for i, (n, _, _) in enumerate(requests)]  # none is a prefix of another
    rest = [LoadRequest(ids, *r[1:]) for ids, r in zip(prompts, requests, strict=True)]
    return Load("test", rest)


def test_all_requests_run_to_their_lengths_and_steps_are_counted(engine):
    result = run_load(engine, load((300, 5, 0.0), (10, 40, 0.0), (20, 1, 0.0)), shown=False)
    assert (result.num_requests, result.num_output_tokens) == (3, 46)
    assert result.num_input_tokens == 330
    assert result.num_steps == len(result.work)
    assert sum(one.num_tokens - one.num_decodes for one in result.work) == 330
    assert sum(one.num_samples for one in result.work) == 46
    assert result.num_prompt_steps == 2
    assert result.num_preemptions == 0
    assert result.output_tokens_per_s == 46 / result.seconds
    assert result.total_tokens_per_s == (46 + 330) / result.seconds
    assert engine.on_launch is None


def test_requests_wait_for_their_arrival_and_the_clock_of_the_first_token_with_them(
    engine, monkeypatch
):
    """On a clock that only sleeping moves, apart from a millisecond at each look."""
    now = [0.0]

    class Clock:
        @staticmethod
        def perf_counter():
            now[0] += 1e-3
            return now[0]

        @staticmethod
        def sleep(seconds):
            now[0] += seconds

    monkeypatch.setattr(module, "time", Clock)
    result = run_load(engine, load((4, 2, 0.0), (4, 3, 5.0)), shown=False)
    assert 5 < result.seconds < 5.1
    assert result.host_s < 0.1, "sleep is no work"
    assert result.ttft.max < 20
    assert (result.tbt.p50, result.tbt.max) == pytest.approx((1.0, 1.0))


def test_steps_in_which_the_host_did_not_wait_are_late(engine):
    result = run_load(engine, load((4, 6, 0.0)), shown=False)
    # The null device has no count of the time waited: as if never waited for.
    assert result.num_late_steps >= result.num_steps
    assert result.waited_s == 0


def test_no_values_have_no_percentiles():
    assert Percentiles.of([]) == Percentiles(0, 0, 0)
    assert Percentiles.of([0.001] * 98 + [0.5] * 2).p99 > 400
