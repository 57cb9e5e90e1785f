"""`tinyvllm bench sweep`: which batch size, block size and preemption threshold suit a load."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from tinyvllm.api.llm import LLM
from tinyvllm.bench.latency import MEASURED_STEPS, decode_times, full_batches
from tinyvllm.bench.lengths import Lengths
from tinyvllm.bench.pressure import (
    COLUMNS,
    PressureResult,
    blocks_under_pressure,
    columns,
    run_requests,
)
from tinyvllm.bench.waste import Waste, simulate_waste
from tinyvllm.config import BLOCK_SIZES, EngineConfig
from tinyvllm.util import InputError, format_bytes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
THRESHOLDS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95)
PARTS = ("batch", "block-size", "threshold")
KNEE_GAIN = 1.15  # what a doubled batch must bring in tokens/s to be worth it


@dataclass(frozen=True)
class BatchRow:
    """Decoding at one batch size."""

    batch: int
    tokens_per_s: float
    ms: float  # of a step: the latency of a token
    kv_bytes: int  # of the blocks that the sequences hold
    pool_used: int  # bytes, all of the engine's


@dataclass(frozen=True)
class BlockSizeRow:
    """All requests at one block size; `output_tokens_per_s` is None where none were run."""

    waste: Waste
    output_tokens_per_s: float | None


@dataclass(frozen=True)
class ThresholdRow:
    """All requests under pressure with one preemption threshold."""

    preemption_threshold: float
    result: PressureResult


def bench_sweep(
    config: EngineConfig,
    lengths: list[Lengths],
    *,
    parts: Sequence[str] = PARTS,
    batches: Sequence[int] = BATCHES,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    thresholds: Sequence[float] = THRESHOLDS,
    share: float = 0.25,
    simulate: bool = False,
    as_json: bool = False,
) -> None:
    """Prints one table for each of `parts`, or one JSON object.

    "batch" decodes at the mean context of the load; "block-size" runs the load with blocks for all;
    "threshold" with a `share` of the KV blocks that it needs. With `simulate` there is "block-size"
    alone, which then runs nothing and needs no device. Raises InputError for values out of range.
    """
    # Before the first of many minutes: all that would be found wrong after them.
    for block_size in block_sizes:
        replace(config, block_size=block_size)
    for threshold in thresholds:
        replace(config, preemption_threshold=threshold)
    blocks_under_pressure(lengths, config.block_size, config.max_num_seqs, share)
    if simulate:
        parts = [part for part in parts if part == "block-size"]
        if not parts:
            raise InputError("simulate: only block sizes can be varied without a device")
    tables: dict[str, object] = {}
    if "batch" in parts:
        context = sum(sum(request) for request in lengths) // len(lengths)
        rows = sweep_batches(config, sorted(set(batches)), context)
        suggested = knee([(row.batch, row.tokens_per_s) for row in rows])
        tables["batch"] = [asdict(row) for row in rows]
        tables["suggested_max_num_seqs"] = suggested
        if not as_json:
            _print_batches(rows, context, suggested)
    if "block-size" in parts:
        tables["block_size"] = found = []
        if not as_json:
            print(f"\n{'block':>5} {'waste':>7} {'entries':>8} {'table':>11} {'tokens/s':>9}")
        for block_row in sweep_block_sizes(config, lengths, block_sizes, simulate):
            found.append({**asdict(block_row.waste), "tokens_per_s": block_row.output_tokens_per_s})
            if not as_json:
                _print_block_size(block_row)
    if "threshold" in parts:
        tables["threshold"] = found = []
        if not as_json:
            print(f"\n{share:.0%} of the KV blocks that the load needs\n{'threshold':>9} {COLUMNS}")
        for row in sweep_thresholds(config, lengths, thresholds, share):
            found.append(asdict(row))
            if not as_json:
                print(f"{row.preemption_threshold:>9.2f} {columns(row.result)}", flush=True)
    if as_json:
        print(json.dumps(tables))


def knee(rates: Sequence[tuple[int, float]]) -> int:
    """The smallest batch from which on doubling it gives less than `KNEE_GAIN` in tokens/s.

    `rates`: (batch, tokens/s) in ascending order of the batch. Between batches that are no double
    of each other the gain is taken as even, so 4 times in two doublings. Without such a point it is
    the largest batch: what limits the rate was not reached.
    """
    best = rates[0][0]
    for (small, slow), (large, fast) in itertools.pairwise(rates):
        if (fast / slow) ** (1 / math.log2(large / small)) >= KNEE_GAIN:
            best = large
    return best


def sweep_batches(config: EngineConfig, batches: Sequence[int], context: int) -> list[BatchRow]:
    """Steps at each batch size, around a context of `context` tokens, from one engine."""
    if not batches or batches[0] < 1:
        raise InputError(f"batches {list(batches)}: must be one or more, each at least 1")
    longest = context + MEASURED_STEPS
    options = replace(full_batches(config, longest), max_num_seqs=batches[-1])
    rows = []
    with LLM(**asdict(options)) as llm:
        blocks, memory = llm.engine.scheduler.blocks, llm.engine.backend.memory
        for batch in batches:
            if batch * blocks.blocks_for(longest) > blocks.num_blocks:
                break  # it would be preempted, and measure that
            seconds, _ = decode_times(llm.engine, batch, context)
            kv_bytes = batch * blocks.blocks_for(context) * memory.block_bytes
            used = llm.stats().pool.used
            rows.append(BatchRow(batch, batch / seconds, seconds * 1e3, kv_bytes, used))
    if not rows:
        raise InputError(f"batch {batches[0]} does not fit into {blocks.num_blocks} KV blocks")
    return rows


def sweep_block_sizes(
    config: EngineConfig, lengths: list[Lengths], block_sizes: Sequence[int], simulate: bool
) -> Iterator[BlockSizeRow]:
    """The load at each block size: its waste by simulation, its speed from an engine."""
    for block_size in block_sizes:
        waste = simulate_waste(
            lengths,
            block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        rate = None
        if not simulate:
            options = replace(config, block_size=block_size, max_model_len=_longest(lengths))
            with LLM(**asdict(options)) as llm:
                run_requests(llm, lengths, seed=0)  # captures graphs
                rate = run_requests(llm, lengths, seed=1).output_tokens_per_s
        yield BlockSizeRow(waste, rate)


def sweep_thresholds(
    config: EngineConfig, lengths: list[Lengths], thresholds: Sequence[float], share: float
) -> Iterator[ThresholdRow]:
    """The load with a share of its KV blocks, at each preemption threshold."""
    num_blocks = blocks_under_pressure(lengths, config.block_size, config.max_num_seqs, share)
    for threshold in thresholds:
        options = replace(
            config,
            preemption_threshold=threshold,
            num_gpu_blocks_override=num_blocks,
            max_model_len=_longest(lengths),
            pin_swap_space=True,
            disable_log_stats=True,  # few blocks are what is wanted
        )
        with LLM(**asdict(options)) as llm:
            run_requests(llm, lengths, seed=0)  # captures graphs
            yield ThresholdRow(threshold, run_requests(llm, lengths, seed=1))


def _longest(lengths: list[Lengths]) -> int:
    return max(map(sum, lengths))


def _print_batches(rows: list[BatchRow], context: int, suggested: int) -> None:
    print(f"decoding around a context of {context}")
    print(f"{'batch':>6} {'tokens/s':>9} {'ms/step':>9} {'KV':>11} {'pool used':>11}")
    for row in rows:
        print(
            f"{row.batch:>6} {row.tokens_per_s:>9.0f} {row.ms:>9.3f} "
            f"{format_bytes(row.kv_bytes):>11} {format_bytes(row.pool_used):>11}"
        )
    why = f"from which on a doubled batch gives less than {KNEE_GAIN - 1:.0%} more tokens/s"
    if suggested == rows[-1].batch:
        why = "the largest measured; larger ones may give more"
    print(f"suggested: max_num_seqs={suggested}, {why}", flush=True)


def _print_block_size(row: BlockSizeRow) -> None:
    waste, rate = row.waste, row.output_tokens_per_s
    speed = "" if rate is None else f"{rate:.0f}"
    print(
        f"{waste.block_size:>5} {waste.waste:>7.2%} {waste.table_entries:>8} "
        f"{format_bytes(waste.table_bytes):>11} {speed:>9}",
        flush=True,
    )
