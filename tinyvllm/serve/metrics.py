"""Numbers for Prometheus, with vLLM's names and meanings, so that its dashboards work."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from tinyvllm.outputs import RequestOutput
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.serve.recent import Recent

TOKEN_BUCKETS = [m * 10**e for e in range(6) for m in (1, 2, 5)]
FIRST_TOKEN_BUCKETS = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
]  # fmt: skip
NEXT_TOKEN_BUCKETS = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
]  # fmt: skip
REQUEST_BUCKETS = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
]  # fmt: skip

# Of the engine's numbers (their names are those of `engine_loop.snapshot`): name, kind, meaning.
ENGINE = {
    "num_requests_running": ("vllm:num_requests_running", "gauge", "sequences that run"),
    "num_requests_waiting": ("vllm:num_requests_waiting", "gauge", "sequences that wait"),
    "num_requests_swapped": ("vllm:num_requests_swapped", "gauge", "sequences swapped out"),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "gauge", "KV blocks in use; 1 is all"),
    "num_preemptions": ("vllm:num_preemptions", "counter", "sequences preempted"),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "counter", "tokens looked up"),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "counter", "tokens found in the prefix cache"),
    "loop_steps": ("tinyvllm:engine_steps", "counter", "steps that followed another at once"),
    "loop_seconds": ("tinyvllm:engine_step_seconds", "counter", "time of these steps"),
    "kv_blocks_total": ("tinyvllm:kv_blocks", "gauge", "KV blocks of the pool"),
    "kv_blocks_used": ("tinyvllm:kv_blocks_used", "gauge", "KV blocks in use"),
    "kv_blocks_cached": ("tinyvllm:kv_blocks_cached", "gauge", "KV blocks kept for prefixes"),
    "kv_blocks_free": ("tinyvllm:kv_blocks_free", "gauge", "KV blocks that are free"),
    "pool_reserved": ("tinyvllm:pool_reserved_bytes", "gauge", "device memory of the pool"),
    "pool_used": ("tinyvllm:pool_used_bytes", "gauge", "device memory in use in the pool"),
    "swap_used_bytes": ("tinyvllm:swap_used_bytes", "gauge", "host memory with swapped blocks"),
    "swap_out_bytes": ("tinyvllm:swap_out_bytes", "counter", "copied to the host"),
    "swap_in_bytes": ("tinyvllm:swap_in_bytes", "counter", "copied back to the device"),
}


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        self.name, self.meaning = name, meaning
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value in."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, names: list[str], values: list[str]) -> HistogramMetricFamily:
        """The histogram as it is exposed."""
        family = HistogramMetricFamily(self.name, self.meaning, labels=names)
        total, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            buckets.append((str(float(bound)) if bound != float("inf") else "+Inf", total))
        family.add_metric(values, buckets, self._sum)
        return family


class Metrics(Collector):
    """A server's numbers; requests report here, and `engine` holds the engine's newest."""

    def __init__(self, model_name: str) -> None:
        self.engine: Mapping[str, float] = {}
        self._labels = {"model_name": model_name, "engine": "0"}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: Counter[str] = Counter()
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "arrival to first token", FIRST_TOKEN_BUCKETS
        )
        self.next_token = Histogram(
            "vllm:inter_token_latency_seconds", "token to token", NEXT_TOKEN_BUCKETS
        )
        # Those two once more, of the last minute.
        self.recent_first_token, self.recent_next_token = Recent(), Recent()
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds", "arrival to last token", REQUEST_BUCKETS
        )
        self.prompt_len = Histogram(
            "vllm:request_prompt_tokens", "tokens of a prompt", TOKEN_BUCKETS
        )
        self.output_len = Histogram(
            "vllm:request_generation_tokens", "tokens of an output", TOKEN_BUCKETS
        )
        self.max_tokens = Histogram(
            "vllm:request_params_max_tokens", "max_tokens of requests", TOKEN_BUCKETS
        )
        self.queue = Histogram(
            "vllm:request_queue_time_seconds", "arrival to first step", REQUEST_BUCKETS
        )
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", "first step to first token", REQUEST_BUCKETS
        )
        self.decode = Histogram(
            "vllm:request_decode_time_seconds", "first token to last token", REQUEST_BUCKETS
        )
        self.inference = Histogram(
            "vllm:request_inference_time_seconds", "first step to last token", REQUEST_BUCKETS
        )
        self.longest = Histogram(
            "vllm:request_max_num_generation_tokens", "tokens of the longest output", TOKEN_BUCKETS
        )
        self.n = Histogram("vllm:request_params_n", "n of requests", [1, 2, 5, 10, 20])
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self, engine: Mapping[str, float]) -> bytes:
        """All numbers in Prometheus's text format; `engine` are the engine's newest."""
        self.engine = engine
        text: bytes = generate_latest(self._registry)
        return text

    def follow(self, params: SamplingParams) -> RequestMetrics:
        """Begins the books of one request."""
        self.n.observe(params.n)
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)
        return RequestMetrics(self, params.n)

    def observe_first(self, seconds: float) -> None:
        """Counts the time to a request's first token in."""
        self.first_token.observe(seconds)
        self.recent_first_token.observe(seconds)

    def observe_next(self, seconds: float, times: int) -> None:
        """Counts the time from one token to the next in, that of so many tokens."""
        self.next_token.observe(seconds, times)
        self.recent_next_token.observe(seconds, times)

    def count_prompt(self, tokens: int) -> None:
        """Counts the tokens of a prompt whose first token has come."""
        self._prompt_tokens += tokens
        self.prompt_len.observe(tokens)

    def count_output(self, tokens: int) -> None:
        """Counts tokens generated."""
        self._generation_tokens += tokens

    def count_end(self, reason: str, times: int = 1) -> None:
        """Counts sequences that have ended."""
        self._finished[reason] += times

    def collect(self) -> Iterable[Metric]:
        """What Prometheus's library asks for."""
        names, values = list(self._labels), list(self._labels.values())
        for key, (name, kind, meaning) in ENGINE.items():
            if key in self.engine:
                family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(
                    name, meaning, labels=names
                )
                family.add_metric(values, self.engine[key])
                yield family
        for name, meaning, value in (
            ("vllm:prompt_tokens", "tokens of prompts", self._prompt_tokens),
            ("vllm:generation_tokens", "tokens generated", self._generation_tokens),
        ):
            counter = CounterMetricFamily(name, meaning, labels=names)
            counter.add_metric(values, value)
            yield counter
        ends = CounterMetricFamily(
            "vllm:request_success", "sequences that ended", labels=[*names, "finished_reason"]
        )
        for reason in ("stop", "length", "abort"):
            ends.add_metric([*values, reason], self._finished[reason])
        yield ends
        for histogram in (
            self.first_token,
            self.next_token,
            self.latency,
            self.queue,
            self.prefill,
            self.decode,
            self.inference,
            self.longest,
            self.prompt_len,
            self.output_len,
            self.max_tokens,
            self.n,
        ):
            yield histogram.family(names, values)


class RequestMetrics:
    """One request's times and tokens, passed on as they come."""

    def __init__(self, metrics: Metrics, n: int) -> None:
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._last: dict[int, float] = {}  # when a sequence's last token came
        self._lengths: Counter[int] = Counter()
        self._num_running = n
        self._begun = False

    def add(self, output: RequestOutput) -> None:
        """Counts in what is new."""
        metrics, now = self._metrics, time.perf_counter()
        if not self._begun:
            self._begun = True
            self._first = now
            metrics.observe_first(now - self._arrival)
            metrics.count_prompt(len(output.prompt_token_ids))
        for o in output.outputs:
            count = len(o.token_ids)
            if count:
                last = self._last.get(o.index)
                if last is not None:  # several tokens at once share the time
                    metrics.observe_next((now - last) / count, count)
                elif count > 1:  # what comes with the first token comes no later
                    metrics.observe_next(0.0, count - 1)
                self._last[o.index] = now
            self._lengths[o.index] += count
            metrics.count_output(count)
            if o.finish_reason is not None:
                metrics.output_len.observe(self._lengths[o.index])
                metrics.count_end(o.finish_reason)
                self._num_running -= 1
        if output.finished:
            self._observe_end(now, output.queue_seconds or 0.0)

    def _observe_end(self, now: float, queued: float) -> None:
        metrics, begin = self._metrics, self._arrival + queued
        metrics.latency.observe(now - self._arrival)
        metrics.queue.observe(queued)
        metrics.prefill.observe(max(0.0, self._first - begin))
        metrics.decode.observe(now - self._first)
        metrics.inference.observe(max(0.0, now - begin))
        metrics.longest.observe(max(self._lengths.values(), default=0))

    def close(self) -> None:
        """Counts sequences that have not ended as aborted: their caller went away."""
        if self._begun:
            self._metrics.count_end("abort", self._num_running)
