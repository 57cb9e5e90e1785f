"""`tinyvllm bench latency`: the time of a decode step, end to end through the engine."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from tinyvllm.api.llm import LLM
from tinyvllm.bench.floors import device_rates, step_floor
from tinyvllm.bench.synthetic import SyntheticSteps, check_steps
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

WARMUP_STEPS = 8
MEASURED_STEPS = 48
SETTLE_STEPS = 256  # at most half the context: prompts heat the card, which then runs slower


@dataclass(frozen=True)
class LatencyRow:
    """A decode step at one batch and context: milliseconds, and rates at that time."""

    batch: int
    context: int
    ms: float
    graph_ms: float  # the step's graph, replayed without the engine
    over_graph: float
    floor_ms: float
    ratio: float  # to the floor
    tb_per_s: float  # of the bytes that the step must move
    tokens_per_s: float
    host_ms: float  # of the host's own work, the wait for the device left out


def bench_latency(
    config: EngineConfig, batches: list[int], contexts: list[int], *, as_json: bool, host: bool
) -> None:
    """Median time of a decode step, end to end through the engine, for each batch and context.

    `host` adds the host's own time in a step, which runs while the device works.
    """
    check_steps(batches, contexts)
    if reason := cuda_unavailable():
        raise InputError(f"bench latency needs a GPU: {reason}")
    name, rates = device_rates(config)
    rows = []
    longest = max(contexts) + MEASURED_STEPS
    with LLM(**asdict(full_batches(config, longest))) as llm:
        for batch, context in itertools.product(batches, contexts):
            settle = min(SETTLE_STEPS, context // 2)
            seconds, host_seconds = decode_times(llm.engine, batch, context, settle=settle)
            graph = graph_seconds(llm.engine, batch, context, settle)
            num_bytes, floor = step_floor(
                llm.engine.model.config, config.block_size, batch, context, rates
            )
            rows.append(
                LatencyRow(
                    batch,
                    context,
                    ms=seconds * 1e3,
                    graph_ms=graph * 1e3,
                    over_graph=seconds / graph,
                    floor_ms=floor * 1e3,
                    ratio=seconds / floor,
                    tb_per_s=num_bytes / seconds / 1e12,
                    tokens_per_s=batch / seconds,
                    host_ms=host_seconds * 1e3,
                )
            )
    if as_json:
        head = {"device": name, **rates.figures()}
        print(json.dumps({**head, "rows": [asdict(row) for row in rows]}))
        return
    flops = rates.flops
    known = f"products at {flops / 1e12:.0f} TFLOP/s" if flops < math.inf else "products not known"
    print(f"{name}: copies at {rates.copy / 1e12:.2f} TB/s, {known}")
    print(
        f"{'batch':>6} {'context':>8} {'ms/step':>9} {'graph':>8} {'ratio':>6} {'floor':>8} "
        f"{'ratio':>6} {'TB/s':>6} "
        f"{'tokens/s':>9}" + (f" {'host ms':>8} {'us/row':>7}" if host else "")
    )
    for r in rows:
        host_columns = f" {r.host_ms:>8.3f} {r.host_ms / r.batch * 1e3:>7.2f}" if host else ""
        print(
            f"{r.batch:>6} {r.context:>8} {r.ms:>9.3f} {r.graph_ms:>8.3f} {r.over_graph:>6.3f} "
            f"{r.floor_ms:>8.3f} {r.ratio:>6.2f} {r.tb_per_s:>6.2f} {r.tokens_per_s:>9.0f}"
            f"{host_columns}"
        )


def full_batches(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """The configuration for `decode_times`: all KV blocks may be in use, none is kept back."""
    return replace(config, max_model_len=max_model_len, preemption_threshold=1.0)


def graph_seconds(engine: LLMEngine, batch: int, context: int, settle: int) -> float:
    """Seconds of the graph of such a step, replayed without the engine around it.

    Nothing may be running; what the KV cache holds is lost.
    """
    backend = engine.backend
    assert isinstance(backend.executor, CudaExecutor)
    steps = SyntheticSteps(backend.executor, backend.limits, engine.model.config.vocab_size)
    return steps.graph_seconds("decode.plain", batch, context, settle)


def decode_times(
    engine: LLMEngine,
    batch: int,
    context: int,
    each_step: Callable[[], None] | None = None,
    settle: int = 0,
) -> tuple[float, float]:
    """Median seconds of a step, and of the host's own work in it, while all rows decode.

    Runs until every request has finished. The middle of the measured steps has the context named.
    `each_step` is called before each measured step and counts to its time. `settle` steps more
    come before those that are measured. Raises InputError when the rows never decode all at once
    for long enough.
    """
    tokens = settle + MEASURED_STEPS
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    check_int("batch", batch, 1, engine.scheduler.max_num_seqs)
    check_int("context", context, 1, engine.backend.max_model_len)
    rng = np.random.default_rng(0)
    for i in range(batch):
        length = max(1, context - MEASURED_STEPS // 2 - settle)
        ids = rng.integers(0, engine.model.config.vocab_size, length).tolist()
        engine.add_request(f"{batch}.{context}.{i}", {"prompt_token_ids": ids}, params)
    times, host = [], []
    running = engine.scheduler.running
    executor = engine.backend.executor
    while engine.has_unfinished_requests():
        decoding = len(running) == batch and all(r.decoding for r in running)
        waited, start = getattr(executor, "waited", 0.0), time.perf_counter()
        if each_step is not None and decoding:
            each_step()
        engine.step()
        seconds = time.perf_counter() - start
        if decoding:
            times.append(seconds)
            host.append(seconds - (getattr(executor, "waited", 0.0) - waited))
    first = max(WARMUP_STEPS, len(times) - MEASURED_STEPS + WARMUP_STEPS)
    steady = slice(first, -WARMUP_STEPS)
    if not times[steady]:
        raise InputError(
            f"batch {batch}, context {context}: all rows decode in {len(times)} steps, and more "
            f"than {2 * WARMUP_STEPS} are needed; the first rows end while the prompts of the last "
            f"are computed (max_num_batched_tokens={engine.config.max_num_batched_tokens}) or wait "
            f"for KV blocks ({engine.scheduler.blocks.num_blocks}, preemption_threshold="
            f"{engine.config.preemption_threshold}): raise these, or lower batch or context"
        )
    return statistics.median(times[steady]), statistics.median(host[steady])
