"""Requests run through an engine with too few KV blocks for them, and what that took."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tinyvllm.api.llm import LLM
from tinyvllm.bench.lengths import Lengths
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError, ceil_div


@dataclass(frozen=True)
class PressureResult:
    """One run of all requests. Rates are bytes a second while copies ran, times in seconds."""

    seconds: float
    output_tokens_per_s: float
    num_preemptions_swap: int
    num_preemptions_recompute: int
    prefill_tokens: int  # the prompts', and those computed again
    swap_out_bytes: int
    swap_in_bytes: int
    swap_out_rate: float
    swap_in_rate: float
    plain_out_rate: float
    plain_in_rate: float
    num_stalls: int
    stall_seconds: float


def blocks_under_pressure(
    lengths: list[Lengths], block_size: int, max_num_seqs: int, share: float
) -> int:
    """A share of the KV blocks that requests need, but enough for the longest of them alone.

    What they need is what as many as run at once hold, on average, at their ends. Raises InputError
    for a share that is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share}: must be above 0 and at most 1")
    each = [ceil_div(sum(request), block_size) for request in lengths]
    needed = sum(each) * min(1.0, max_num_seqs / len(lengths))
    return max(int(share * needed), *each)


def run_requests(llm: LLM, lengths: list[Lengths], seed: int) -> PressureResult:
    """Runs requests of these lengths, queued at once, with random prompts that `seed` chooses.

    Runs of one engine need different seeds, or they find their prompts in the prefix cache.
    """
    rng = np.random.default_rng(seed)
    vocab_size = llm.engine.model.config.vocab_size
    prompts = [
        {"prompt_token_ids": rng.integers(0, vocab_size, request.input_len).tolist()}
        for request in lengths
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        for request in lengths
    ]
    before, start = llm.stats(), time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, llm.stats()
    swap = after.swap.since(before.swap)
    return PressureResult(
        seconds=seconds,
        output_tokens_per_s=(after.generation_tokens - before.generation_tokens) / seconds,
        num_preemptions_swap=after.num_preemptions_swap - before.num_preemptions_swap,
        num_preemptions_recompute=(
            after.num_preemptions_recompute - before.num_preemptions_recompute
        ),
        prefill_tokens=after.prefill_tokens - before.prefill_tokens,
        swap_out_bytes=swap.out_bytes,
        swap_in_bytes=swap.in_bytes,
        swap_out_rate=swap.out_rate,
        swap_in_rate=swap.in_rate,
        plain_out_rate=swap.plain_out_rate,
        plain_in_rate=swap.plain_in_rate,
        num_stalls=swap.num_stalls,
        stall_seconds=swap.stall_seconds,
    )


COLUMNS = (
    f"{'tokens/s':>9} {'swapped':>8} {'recomp.':>8} {'prefill':>9} {'out GB':>7} {'in GB':>7} "
    f"{'out GB/s':>9} {'in GB/s':>8} {'stalls':>7} {'stall ms':>9}"
)


def columns(r: PressureResult) -> str:
    """A result under `COLUMNS`."""
    return (
        f"{r.output_tokens_per_s:>9.0f} {r.num_preemptions_swap:>8} "
        f"{r.num_preemptions_recompute:>8} {r.prefill_tokens:>9} "
        f"{r.swap_out_bytes / 1e9:>7.2f} {r.swap_in_bytes / 1e9:>7.2f} "
        f"{r.swap_out_rate / 1e9:>9.1f} {r.swap_in_rate / 1e9:>8.1f} "
        f"{r.num_stalls:>7} {r.stall_seconds * 1e3:>9.1f}"
    )
