"""`tinyvllm bench prefill`: prompts alone, cut into chunks of several sizes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace

from tinyvllm.api.llm import LLM
from tinyvllm.bench.floors import device_rates
from tinyvllm.bench.kernels import KernelBench, StepTime, print_step
from tinyvllm.bench.lengths import Lengths
from tinyvllm.bench.loads import of_lengths
from tinyvllm.bench.step_floors import StepFloors
from tinyvllm.bench.throughput import measure
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.util import InputError

WARMUP_RUNS = 2
# (prompts, tokens of each): what others reach with them, in tokens a second.
RIVALS = {
    (1, 8192): {
        "PyTorch 2.11, H200, 2026-11-29": 217000,
        "vLLM 0.26, H200, 2026-11-29": 193000,
        "llama.cpp b11312, H200, 2026-11-29": 72000,
    },
    (32, 1024): {"vLLM 0.26, H200, 2026-11-29": 255000},
}


@dataclass(frozen=True)
class PrefillRow:
    """Prompts from the first's arrival to the last's first token: medians of several runs."""

    prompts: int
    length: int
    chunk: int  # most tokens in a step
    ms: float
    floor_ms: float
    ratio: float
    tokens_per_s: float
    host_ms: float  # of the host's own work, some of it while the device works


def bench_prefill(
    config: EngineConfig,
    shapes: Sequence[tuple[int, int]],
    chunks: Sequence[int],
    *,
    runs: int,
    ops: bool,
    as_json: bool,
) -> None:
    """Prompts as (how many, tokens of each), in steps of up to `chunks` tokens.

    `ops` adds a table of the ops of one step with all of the tokens of each shape. Raises
    InputError without a GPU and for sizes that are not positive.
    """
    check_shapes(shapes, chunks, runs)
    if reason := cuda_unavailable():
        raise InputError(f"bench prefill needs a GPU: {reason}")
    name, rates = device_rates(config)
    most = max(chunks)
    config = replace(
        config,
        max_model_len=max(length for _, length in shapes) + 1,
        max_num_seqs=min(most, max(config.max_num_seqs, *(prompts for prompts, _ in shapes))),
        max_num_batched_tokens=most,
        preemption_threshold=1.0,
    )
    rows = []
    with LLM(**asdict(config)) as llm:
        floors = StepFloors(llm.engine.model.config, config.block_size, rates)
        for prompts, length in shapes:
            for chunk in chunks:
                rows.append(_measure(llm.engine, floors, prompts, length, chunk, runs))
    steps: list[StepTime] = []
    if ops:
        largest = max(prompts * length for prompts, length in shapes)
        with closing(KernelBench(replace(config, max_num_batched_tokens=largest), rates)) as bench:
            steps = [bench.step("prefill", "plain", *shape) for shape in shapes]
    if as_json:
        tables = {"rows": [asdict(row) for row in rows], "steps": [asdict(step) for step in steps]}
        rivals = [{"prompts": s[0], "length": s[1], **RIVALS.get(s, {})} for s in shapes]
        print(json.dumps({"device": name, "rivals": rivals, **tables}))
        return
    print(f"{name}: copies at {rates.copy / 1e12:.2f} TB/s")
    _print_rows(rows)
    for step in steps:
        print_step(step)


def check_shapes(shapes: Sequence[tuple[int, int]], chunks: Sequence[int], runs: int) -> None:
    """InputError for sizes that cannot be measured."""
    check_int("runs", runs, 1, None)
    for prompts, length in shapes:
        check_int("prompts", prompts, 1, 4096)
        check_int("length", length, 1, 1 << 20)
    for chunk in chunks:
        check_int("chunk", chunk, 1, 1 << 20)


def _measure(
    engine: LLMEngine, floors: StepFloors, prompts: int, length: int, chunk: int, runs: int
) -> PrefillRow:
    vocab_size = engine.model.config.vocab_size
    engine.scheduler.max_num_batched_tokens = chunk  # buffers have room for the largest
    results = []
    for seed in range(WARMUP_RUNS + runs):
        lengths = [Lengths(length, 1)] * prompts
        name = f"{prompts}x{length}.{chunk}.{seed}"
        results.append(measure(engine, of_lengths(name, lengths, vocab_size, seed), shown=False))
    found = results[WARMUP_RUNS:]
    seconds = statistics.median(result.seconds for result in found)
    floor = floors.total(found[0].work)
    return PrefillRow(
        prompts,
        length,
        chunk,
        ms=seconds * 1e3,
        floor_ms=floor * 1e3,
        ratio=seconds / floor,
        tokens_per_s=prompts * length / seconds,
        host_ms=statistics.median(result.host_s for result in found) * 1e3,
    )


def _print_rows(rows: list[PrefillRow]) -> None:
    print(
        f"{'prompts':>7} {'length':>7} {'chunk':>6} {'ms':>8} {'floor':>8} {'ratio':>6} "
        f"{'tokens/s':>9} {'host ms':>8}"
    )
    for r in rows:
        print(
            f"{r.prompts:>7} {r.length:>7} {r.chunk:>6} {r.ms:>8.2f} {r.floor_ms:>8.2f} "
            f"{r.ratio:>6.2f} {r.tokens_per_s:>9.0f} {r.host_ms:>8.2f}"
        )
    for shape in dict.fromkeys((r.prompts, r.length) for r in rows):
        for rival, rate in RIVALS.get(shape, {}).items():
            print(f"    {shape[0]} x {shape[1]}: {rival}: {rate} tokens/s")
