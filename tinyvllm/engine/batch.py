"""A scheduled step as the arrays and sizes that the step program reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyvllm.engine.request import Request
from tinyvllm.engine.scheduler import ScheduledRow, ScheduledStep
from tinyvllm.model.llama import BLOCK_EDIT_WORDS, ROW_EDIT_WORDS
from tinyvllm.sampling_params import MAX_LOGPROBS
from tinyvllm.util import ceil_div

MIN_CONTEXT_CLASS = 256
SCORE_ROWS = 256  # positions whose log-probabilities are computed at a time


@dataclass(frozen=True)
class Batch:
    """Inputs of the step program (int32) and the sizes to bind."""

    dims: dict[str, int]
    inputs: dict[str, np.ndarray]


def size_class(n: int, smallest: int = 1) -> int:
    """The power of two (at least `smallest`) that `n` is rounded up to, so that sizes repeat."""
    return max(smallest, 1 << (n - 1).bit_length())


def step_limits(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> dict[str, int]:
    """Largest sizes of a step program; NB, the number of KV blocks, is added once it is known."""
    return {
        "T": max_num_batched_tokens,
        "R": max_num_seqs,
        "R1": max_num_seqs + 1,
        "S": max_num_seqs,
        "D": max_num_seqs,
        "Q": size_class(max_num_batched_tokens),
        "C": size_class(max_model_len, MIN_CONTEXT_CLASS),
        "SLOTS": max_num_seqs,
        "MB": ceil_div(max_model_len, block_size),
        "E": max_num_seqs,
        # Each row of a step may begin a block, besides those that its tokens fill.
        "B": ceil_div(max_num_batched_tokens, block_size) + max_num_seqs,
        "N": SCORE_ROWS,
        "P": MAX_LOGPROBS,
    }


def build_batch(step: ScheduledStep, engine_seed: int) -> Batch:
    """Inputs for one step: edits of the row state, the rows, and the prompts' token ids."""
    rows = step.rows
    prefill = step.prefill_rows
    prompt_ids = np.full(step.num_tokens, -1, np.int32)  # -1: the row's own last token
    offset = step.num_decodes
    for row in prefill:
        prompt_ids[offset : offset + row.num_tokens] = row.request.tokens(
            row.start, row.start + row.num_tokens
        )
        offset += row.num_tokens
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([row.num_tokens for row in rows], out=query_start[1:])
    sample_rows = [i for i, row in enumerate(rows) if row.samples]
    inputs = {
        "edit_counts": np.array([len(step.joins), len(step.new_blocks)], np.int32),
        "row_edits": _row_edits(step.joins, engine_seed),
        "batch_slots": np.array([row.slot for row in rows], np.int32),
        "query_start": query_start,
        "sample_rows": np.array(sample_rows, np.int32),
        "block_edits": np.array(step.new_blocks, np.int32).reshape(-1, BLOCK_EDIT_WORDS),
        "prompt_ids": prompt_ids,
    }
    longest_context = max(row.start + row.num_tokens for row in rows)
    longest_query = max((row.num_tokens for row in prefill), default=0)
    dims = {
        "T": step.num_tokens,
        "R": len(rows),
        "R1": len(rows) + 1,
        "S": len(sample_rows),
        "D": step.num_decodes,
        "Q": size_class(longest_query) if longest_query else 0,
        "C": size_class(longest_context, MIN_CONTEXT_CLASS),
    }
    return Batch(dims, inputs)


def _row_edits(joins: list[ScheduledRow], engine_seed: int) -> np.ndarray:
    """[n, 8] int32: slot, position, token, temperature bits, seed low, seed high, 0, 0."""
    edits = np.zeros((len(joins), ROW_EDIT_WORDS), np.int32)
    for edit, row in zip(edits, joins, strict=True):
        seed = request_seed(row.request, engine_seed)
        edit[:3] = row.slot, row.start, 0
        edit[3] = np.float32(row.request.params.temperature).view(np.int32)
        edit[4:6] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    return edits


def request_seed(request: Request, engine_seed: int) -> int:
    """The request's own seed, or one drawn from the engine's seed and the order of arrival.

    64 bits; the mixing is splitmix64's (Steele, Lea, Flood 2014).
    """
    if request.params.seed is not None:
        return request.params.seed
    mask = (1 << 64) - 1
    z = (engine_seed + (request.arrival + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
