"""Logits changed by what the request asks for: penalties on tokens so far, biases, forbidden words.

The token counts that penalties need live here too: how they are reset and kept up.
"""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params
from tinyvllm.util import DType, ceil_div

RESET_COUNTS = Kernel(
    "logit_adjust.cu",
    "reset_counts_kernel",
    "ptr edit_counts, ptr row_edits, ptr token_counts, i32 vocab",
    pdl=True,
)
COUNT_TOKENS = Kernel(
    "logit_adjust.cu",
    "count_tokens_kernel",
    "ptr token_ids, ptr positions, ptr token_slots, ptr row_params, ptr token_counts, "
    "ptr row_history, i32 num_tokens, i32 vocab",
    pdl=True,
)
ADJUST_LOGITS = Kernel(
    "logit_adjust.cu",
    "adjust_logits_kernel",
    "ptr logits, ptr sample_slots, ptr sample_positions, ptr row_params, ptr token_counts, "
    "ptr row_history, ptr row_bias_tokens, ptr row_bias_values, ptr row_bias_until, "
    "ptr row_bad_words, ptr adjusted, i32 vocab, i32 max_bias, i32 max_bad_words",
    pdl=True,
)
# Constants of logit_adjust.cu.
THREADS = 256
CHUNK = 4096  # logits or counts of a block
IN_PROMPT = 1 << 30  # of a token count: the prompt has the token
OUTPUT_COUNT = IN_PROMPT - 1  # of a token count: how often the output has it
HISTORY = 8  # last tokens kept of a row, each at its position modulo this
BAD_WORD_WORDS = 8  # [last token, length of what precedes it, up to 6 tokens that do]


class ResetCounts(OpDef):
    """Zeroes the token counts of the slots in which a counted row joins."""

    name = "reset_counts"
    reads = {"edit_counts": (2,), "row_edits": ("E", ROW_WORDS)}
    writes = {"token_counts": ("SLOTS", "V")}
    out_dtypes = {"token_counts": DType.I32}

    def reference(self, a: Operands) -> None:
        rows = as_row_params(a.row_edits[: a.edit_counts[0]])
        a.token_counts[rows["slot"][rows["counted"] != 0]] = 0

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        max_edits, vocab = a.row_edits.shape[0], a.token_counts.shape[1]
        if max_edits == 0:
            return []
        return [
            RESET_COUNTS().launch(
                (ceil_div(vocab, CHUNK), max_edits),
                THREADS,
                edit_counts=a.edit_counts.ptr,
                row_edits=a.row_edits.ptr,
                token_counts=a.token_counts.ptr,
                vocab=vocab,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        return Cost(nbytes(a.edit_counts))  # how many edits there are is not known from shapes


class CountTokens(OpDef):
    """Counts the input tokens of a step, for counted rows, and keeps their last ones.

    A count is IN_PROMPT, if the prompt has the token, plus its number in the output. Each known
    token of a row is an input once from its join at position 0 on, so it is counted once.
    """

    name = "count_tokens"
    reads = {
        "token_ids": ("T",),
        "positions": ("T",),
        "token_slots": ("T",),
        "row_params": ("SLOTS", ROW_WORDS),
    }
    writes = {"token_counts": ("SLOTS", "V"), "row_history": ("SLOTS", HISTORY)}
    out_dtypes = dict.fromkeys(writes, DType.I32)

    def reference(self, a: Operands) -> None:
        rows = as_row_params(a.row_params)
        counted = a.token_slots >= 0
        counted[counted] = rows["counted"][a.token_slots[counted]] != 0
        slots, tokens = a.token_slots[counted], a.token_ids[counted]
        positions = a.positions[counted]
        prompt = positions < rows["prompt_len"][slots]
        a.token_counts[slots[prompt], tokens[prompt]] |= IN_PROMPT
        np.add.at(a.token_counts, (slots[~prompt], tokens[~prompt]), 1)
        a.row_history[slots, positions % HISTORY] = tokens  # of those at one place the last stays

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        num_tokens = a.token_ids.shape[0]
        if num_tokens == 0:
            return []
        arrays = {name: getattr(a, name).ptr for name in (*self.reads, *self.writes)}
        return [
            COUNT_TOKENS().launch(
                (ceil_div(num_tokens, THREADS),),
                THREADS,
                **arrays,
                num_tokens=num_tokens,
                vocab=a.token_counts.shape[1],
            )
        ]

    def cost(self, a: Operands) -> Cost:
        return Cost(nbytes(a.token_ids, a.positions, a.token_slots))


class AdjustLogits(OpDef):
    """The logits that a row samples from, of the model's, in vLLM's order.

    First each of the row's biases is added whose `until` lies above the position that is sampled.
    Then, for counted rows, the penalties: repetition divides positive logits of tokens in prompt
    or output and multiplies negative ones; frequency, for each time, and presence, once, are taken
    from those of tokens in the output. Then -inf for what is forbidden: tokens whose bias is -inf,
    and the last token of a bad word where the output ends with what precedes it in the word.
    """

    name = "adjust_logits"
    reads = {
        "logits": ("S", "V"),
        "sample_slots": ("S",),
        "sample_positions": ("S",),
        "row_params": ("SLOTS", ROW_WORDS),
        "token_counts": ("SLOTS", "V"),
        "row_history": ("SLOTS", HISTORY),
        "row_bias_tokens": ("SLOTS", "A"),
        "row_bias_values": ("SLOTS", "A"),
        "row_bias_until": ("SLOTS", "A"),
        "row_bad_words": ("SLOTS", "W", BAD_WORD_WORDS),
    }
    writes = {"adjusted": ("S", "V")}
    out_dtypes = {"adjusted": DType.F32}

    def reference(self, a: Operands) -> None:
        a.adjusted[...] = a.logits
        rows = as_row_params(a.row_params)
        for s, slot in enumerate(a.sample_slots):
            if slot < 0:
                continue
            row, out, position = rows[slot], a.adjusted[s], a.sample_positions[s]
            current = position < a.row_bias_until[slot, : row["num_bias"]]
            tokens = a.row_bias_tokens[slot, : row["num_bias"]][current]
            values = a.row_bias_values[slot, : row["num_bias"]][current]
            finite = values > -np.inf
            out[tokens[finite]] += values[finite]
            if row["counted"]:
                _penalise(out, a.token_counts[slot], row)
            out[tokens[~finite]] = -np.inf
            for word in a.row_bad_words[slot, : row["num_bad_words"]]:
                token, length, ids = word[0], word[1], word[2 : 2 + word[1]]
                before = np.arange(position - length, position)
                in_output = position - length >= row["prompt_len"]
                if in_output and (a.row_history[slot, before % HISTORY] == ids).all():
                    out[token] = -np.inf

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        assert a.logits.contiguous and a.adjusted.contiguous
        S, V = a.logits.shape
        if S == 0:
            return []
        arrays = {name: getattr(a, name).ptr for name in (*self.reads, *self.writes)}
        return [
            ADJUST_LOGITS().launch(
                (ceil_div(V, CHUNK), S),
                THREADS,
                **arrays,
                vocab=V,
                max_bias=a.row_bias_tokens.shape[1],
                max_bad_words=a.row_bad_words.shape[1],
            )
        ]

    def cost(self, a: Operands) -> Cost:
        return Cost(3 * nbytes(a.logits))  # and the counts


def _penalise(logits: np.ndarray, counts: np.ndarray, row: np.void) -> None:
    """The penalties of one row, in place; every operation is rounded as in logit_adjust.cu."""
    seen = np.flatnonzero(counts)
    x, times = logits[seen], counts[seen] & OUTPUT_COUNT
    x = np.where(x > 0, x / row["repetition"], x * row["repetition"])
    x -= row["frequency"] * times.astype(np.float32)
    x -= np.where(times > 0, row["presence"], np.float32(0))
    logits[seen] = x
