"""Counting requests: times that add up, several tokens at once, callers that leave."""

import re

from tinyvllm.api.engine_loop import snapshot
from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.outputs import CompletionOutput, RequestOutput
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.serve.metrics import ENGINE, Histogram, Metrics


def news(*rows, finished=False):
    """One output; each row: index, number of tokens, finish reason."""
    outputs = [CompletionOutput(i, "", [7] * n, finish_reason=reason) for i, n, reason in rows]
    return RequestOutput("x", None, [1, 2, 3], None, outputs, finished, queue_seconds=0.0)


def values(metrics, engine=None):
    text = metrics.exposition(engine or {}).decode()
    found = re.findall(r"^(\S+?){engine=\"0\",(?:(.*),)?model_name=\"m\"} (\S+)$", text, re.M)
    return {(name, extra): float(value) for name, extra, value in found}


def test_a_value_on_a_bound_is_below_it_and_buckets_add_up():
    histogram = Histogram("h", "a test", [1, 2, 5])
    for value, times in ((0.5, 1), (2, 3), (9, 1)):
        histogram.observe(value, times)
    samples = {
        (s.name, s.labels.get("le")): s.value for s in histogram.family(["a"], ["b"]).samples
    }
    assert [samples["h_bucket", le] for le in ("1.0", "2.0", "5.0", "+Inf")] == [1, 4, 4, 5]
    assert samples["h_count", None] == 5 and samples["h_sum", None] == 15.5


def test_tokens_and_ends_are_counted_once():
    metrics = Metrics("m")
    request = metrics.follow(SamplingParams(n=2, temperature=1, max_tokens=9))
    request.add(news((0, 1, None), (1, 0, None)))
    request.add(news((1, 2, None)))
    request.add(news((0, 3, "stop")))
    request.add(news((1, 7, "length"), finished=True))
    request.close()
    found = values(metrics)
    assert found["vllm:prompt_tokens_total", ""] == 3
    assert found["vllm:generation_tokens_total", ""] == 13
    assert found["vllm:request_generation_tokens_sum", ""] == 13
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 9
    # All but the first token of each sequence, however they come.
    assert found["vllm:inter_token_latency_seconds_count", ""] == 11
    assert found["vllm:time_to_first_token_seconds_count", ""] == 1
    for reason, count in (("stop", 1), ("length", 1), ("abort", 0)):
        assert found["vllm:request_success_total", f'finished_reason="{reason}"'] == count
    assert found["vllm:request_params_n_sum", ""] == 2


def test_a_caller_that_leaves_is_an_abort():
    metrics = Metrics("m")
    request = metrics.follow(SamplingParams(n=3, temperature=1))
    request.add(news((0, 1, None), (1, 1, "stop")))
    request.close()
    found = values(metrics)
    assert found["vllm:request_success_total", 'finished_reason="abort"'] == 2
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 0


def test_all_numbers_of_the_engine_are_there(golden):
    config = EngineConfig(model=str(golden / "llama_bias"), device="cpu", max_num_seqs=4)
    engine = LLMEngine(config)
    numbers = snapshot(engine) | {"loop_steps": 0, "loop_seconds": 0.0}
    found = values(Metrics("m"), numbers)
    for key, (name, kind, _) in ENGINE.items():
        shown = f"{name}_total" if kind == "counter" else name
        assert found[shown, ""] == numbers[key]
    engine.close()
