"""A scheduled step as the arrays and sizes that the step program reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np

from tinyvllm.engine.request import Request
from tinyvllm.engine.step import ScheduledRow, ScheduledStep
from tinyvllm.ops.row_params import as_words, new_row_params
from tinyvllm.ops.row_state import BLOCK_EDIT_WORDS
from tinyvllm.sampling_params import MAX_LOGPROBS
from tinyvllm.util import align_up, ceil_div

MIN_CONTEXT_CLASS = 256  # tokens; longest contexts are rounded up to powers of two from here on
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
        "CP": max_num_seqs,
        "N": SCORE_ROWS,
        "P": MAX_LOGPROBS,
    }


def row_bucket(n: int, max_num_seqs: int) -> int:
    """Rows that a decode step of `n` rows is padded to: 1, 2, 4, 8, then multiples of 8."""
    bucket = size_class(n) if n <= 8 else align_up(n, 8)
    return min(bucket, max_num_seqs)


def build_batch(step: ScheduledStep, engine_seed: int, limits: Mapping[str, int]) -> Batch:
    """Inputs for one step: edits of the row state, the rows, and the prompts' token ids.

    A step of decode rows alone is padded with inert rows (slot -1), so that sizes repeat and a
    graph serves many steps.
    """
    if step.num_decodes == len(step.rows):
        return _decode_batch(step, engine_seed, limits)
    rows = step.rows
    prefill = step.prefill_rows
    prompt_ids = np.full(step.num_tokens, -1, np.int32)  # -1: the row's own last token
    offset = step.num_decodes
    for row in prefill:
        row.request.copy_tokens(row.start, prompt_ids[offset : offset + row.num_tokens])
        offset += row.num_tokens
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([row.num_tokens for row in rows], out=query_start[1:])
    sample_rows = [i for i, row in enumerate(rows) if row.samples]
    inputs = {
        "edit_counts": np.array([len(step.joins), len(step.new_blocks)], np.int32),
        "row_edits": _row_edits(step.joins, engine_seed),
        "block_copies": np.array(step.block_copies, np.int32).reshape(-1, 2),
        "batch_slots": np.array([row.slot for row in rows], np.int32),
        "query_start": query_start,
        "sample_rows": np.array(sample_rows, np.int32),
        "block_edits": _block_edits(step),
        "prompt_ids": prompt_ids,
    }
    longest_query = max((row.num_tokens for row in prefill), default=0)
    dims = {
        "T": step.num_tokens,
        "R": len(rows),
        "R1": len(rows) + 1,
        "S": len(sample_rows),
        "D": step.num_decodes,
        "Q": size_class(longest_query) if longest_query else 0,
        "C": size_class(step.longest_context, MIN_CONTEXT_CLASS),
        "CP": len(step.block_copies),
    }
    return Batch(dims, inputs)


def take_excess_edits(step: ScheduledStep, capacity: int) -> list[dict[str, np.ndarray]]:
    """Inputs for runs of their own where a step has more table entries than its inputs hold.

    Long cached prefixes that many rows share make so many; those entries leave the step.
    """
    runs = []
    while len(step.new_blocks) > capacity:
        part, step.new_blocks = step.new_blocks[:capacity], step.new_blocks[capacity:]
        counts = np.array([0, len(part)], np.int32)
        runs.append({"edit_counts": counts, "block_edits": np.array(part, np.int32)})
    return runs


def _decode_batch(step: ScheduledStep, engine_seed: int, limits: Mapping[str, int]) -> Batch:
    rows = step.rows
    bucket = row_bucket(len(rows), limits["R"])
    slots = np.full(bucket, -1, np.int32)
    slots[: len(rows)] = [row.slot for row in rows]
    counting, minus_one = _constants(bucket)
    inputs = {
        "edit_counts": np.array([len(step.joins), len(step.new_blocks)], np.int32),
        "batch_slots": slots,
        "query_start": counting,
        "sample_rows": counting[:-1],
        "block_edits": _block_edits(step),
        "prompt_ids": minus_one,
    }
    if step.joins:  # declared before the others: without it the copy is shorter
        inputs["row_edits"] = _row_edits(step.joins, engine_seed)
    dims = {"T": bucket, "R": bucket, "R1": bucket + 1, "S": bucket, "D": bucket, "Q": 0}
    dims["C"] = size_class(step.longest_context, MIN_CONTEXT_CLASS)
    return Batch(dims, inputs)


@cache
def _constants(bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """0 ... bucket, and -1 for each row."""
    return np.arange(bucket + 1, dtype=np.int32), np.full(bucket, -1, np.int32)


def _block_edits(step: ScheduledStep) -> np.ndarray:
    """int32 [entries, BLOCK_EDIT_WORDS]."""
    # A long prompt has hundreds; word by word takes half as long as from the tuples.
    words = np.fromiter(chain.from_iterable(step.new_blocks), np.int32)
    return words.reshape(-1, BLOCK_EDIT_WORDS)


def _row_edits(joins: list[ScheduledRow], engine_seed: int) -> np.ndarray:
    """int32 words [n, ROW_WORDS]: the parameters of the rows that join."""
    edits = new_row_params(len(joins))
    for edit, row in zip(edits, joins, strict=True):
        request, params = row.request, row.request.params
        seed = request_seed(request, engine_seed)
        edit["slot"], edit["position"] = row.slot, row.start
        edit["token"] = request.tokens(row.start, row.start + 1)[0]
        edit["temperature"] = params.temperature
        edit["seed"] = seed & 0xFFFFFFFF, seed >> 32
        edit["top_k"], edit["top_p"], edit["min_p"] = (
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
        )
        edit["prompt_len"] = len(request.prompt_token_ids)
        edit["repetition"] = params.repetition_penalty
        edit["presence"] = params.presence_penalty
        edit["frequency"] = params.frequency_penalty
        edit["num_bias"] = len(request.row_lists.get("row_bias_tokens", ()))
        edit["num_bad_words"] = len(request.row_lists.get("row_bad_words", ()))
        edit["counted"] = params.counted
    return as_words(edits)


def request_seed(request: Request, engine_seed: int) -> int:
    """The request's own seed, or one drawn from the engine's seed and the order of arrival.

    Further samples of a prompt draw theirs from the request's seed and their index. 64 bits; the
    mixing is splitmix64's (Steele, Lea, Flood 2014).
    """
    seed, number = request.params.seed, request.index
    if seed is None:
        seed, number = engine_seed, request.arrival + 1
    elif number == 0:
        return seed
    mask = (1 << 64) - 1
    z = (seed + number * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
