"""`tinyvllm bench preemption`: swapping against recomputing when KV blocks are short."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from tinyvllm.api.llm import LLM
from tinyvllm.bench.lengths import Lengths
from tinyvllm.bench.pressure import (
    COLUMNS,
    PressureResult,
    blocks_under_pressure,
    columns,
    run_requests,
)
from tinyvllm.config import PREEMPTION_MODES, EngineConfig, check_int
from tinyvllm.util import InputError

UNLIMITED = "unlimited"


@dataclass(frozen=True)
class PreemptionRow:
    """The run of median speed with one block size and mode."""

    block_size: int
    mode: str  # a preemption mode, or "unlimited" with blocks for all
    num_blocks: int
    result: PressureResult


def bench_preemption(
    config: EngineConfig,
    block_sizes: list[int],
    *,
    sequences: int,
    input_len: int,
    output_len: int,
    share: float,
    runs: int,
    as_json: bool,
) -> None:
    """Equal requests with a `share` of the blocks that they need: tokens/s of each mode.

    The swap space is pinned first, so that no run pays for that. Raises InputError for sizes that
    are not positive.
    """
    for name, value in (("sequences", sequences), ("input_len", input_len), ("runs", runs)):
        check_int(name, value, 1, None)
    check_int("output_len", output_len, 1, None)
    if config.swap_space == 0:
        raise InputError("swap_space=0: there is nothing to compare recomputing with")
    lengths = [Lengths(input_len, output_len)] * sequences
    for block_size in block_sizes:  # before the first of many minutes
        replace(config, block_size=block_size)
        blocks_under_pressure(lengths, block_size, sequences, share)
    rows = measure(config, block_sizes, lengths, share, runs)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(
        f"{sequences} sequences, {input_len} tokens in, {output_len} out, {share:.0%} of the KV "
        f"blocks that they need; median of {runs}"
    )
    print(f"{'block':>5} {'mode':>10} {'blocks':>7} {COLUMNS}")
    for row in rows:
        found = columns(row.result)
        print(f"{row.block_size:>5} {row.mode:>10} {row.num_blocks:>7} {found}", flush=True)


def measure(
    config: EngineConfig, block_sizes: list[int], lengths: list[Lengths], share: float, runs: int
) -> Iterator[PreemptionRow]:
    """A row for each block size and mode, the unlimited one first, from an engine of its own."""
    longest = max(map(sum, lengths))
    for block_size in block_sizes:
        limited = blocks_under_pressure(lengths, block_size, len(lengths), share)
        for mode in (UNLIMITED, *reversed(PREEMPTION_MODES)):
            options = replace(
                config,
                block_size=block_size,
                max_model_len=longest,
                max_num_seqs=max(config.max_num_seqs, len(lengths)),
                pin_swap_space=True,
                disable_log_stats=True,  # few blocks are what is wanted
            )
            if mode == UNLIMITED:
                options = replace(options, preemption_threshold=1.0, preemption_mode="recompute")
            else:
                options = replace(options, preemption_mode=mode, num_gpu_blocks_override=limited)
            with LLM(**asdict(options)) as llm:
                results = [run_requests(llm, lengths, seed) for seed in range(runs)]
                num_blocks = llm.stats().kv_blocks_total
            results.sort(key=lambda result: result.seconds)
            yield PreemptionRow(block_size, mode, num_blocks, results[len(results) // 2])
