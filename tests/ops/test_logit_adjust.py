"""Penalties, biases and forbidden words against a plain loop over tokens, step by step."""

import re

import numpy as np
import pytest
from harness import run_cuda, run_numpy

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.ops import logit_adjust
from tinyvllm.ops.logit_adjust import BAD_WORD_WORDS, HISTORY, IN_PROMPT
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.ops.row_params import ROW_WORDS, as_words, new_row_params
from tinyvllm.util import DType

I32 = DType.I32
MAX_BIAS, MAX_WORDS = 40, 9
FOREVER = np.iinfo(np.int32).max


def program(V: int, kinds=("reset_counts", "count_tokens", "adjust_logits")) -> Program:
    p = Program("t")
    p.buffer("token_counts", ("SLOTS", V), I32, STATE)
    p.buffer("row_history", ("SLOTS", HISTORY), I32, STATE)
    p.buffer("row_params", ("SLOTS", ROW_WORDS), I32, STATE)
    p.buffer("row_bias_tokens", ("SLOTS", MAX_BIAS), I32, STATE)
    p.buffer("row_bias_values", ("SLOTS", MAX_BIAS), DType.F32, STATE)
    p.buffer("row_bias_until", ("SLOTS", MAX_BIAS), I32, STATE)
    p.buffer("row_bad_words", ("SLOTS", MAX_WORDS, BAD_WORD_WORDS), I32, STATE)
    p.buffer("edit_counts", (2,), I32, INPUT)
    p.buffer("row_edits", ("E", ROW_WORDS), I32, INPUT)
    for name in ("token_ids", "positions", "token_slots"):
        p.buffer(name, ("T",), I32, INPUT)
    for name in ("sample_slots", "sample_positions"):
        p.buffer(name, ("S",), I32, INPUT)
    p.buffer("logits", ("S", V), DType.F32, INPUT)
    p.buffer("adjusted", ("S", V), DType.F32, OUTPUT)
    for kind in kinds:
        op = op_def(kind)
        p.emit(kind, **{name: name for name in (*op.reads, *op.writes)})
    return p


class Rows:
    """Random rows in the middle of their sequences: each joins, or goes on, with some tokens.

    `tokens[s]` is the row's sequence so far; the step computes `new[s]` of them, the last ones.
    """

    def __init__(self, S: int, V: int, seed: int = 0) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.S, self.V, self.slots = S, V, S + 2
        self.slot = rng.permutation(self.slots)[:S].astype(np.int32)
        self.params = new_row_params(self.slots)
        self.params["slot"] = np.arange(self.slots)
        self.tokens, self.new = [], []
        pool = rng.integers(0, V, 5)  # few tokens, so that they come again
        for s in range(S):
            length = int(rng.integers(1, 30))
            self.tokens.append(rng.choice(pool, length).tolist())
            self.new.append(length if s % 3 == 0 else int(rng.integers(1, length + 1)))
            row = self.params[self.slot[s]]
            row["prompt_len"] = rng.integers(1, length + 1)
            row["counted"] = s % 4 != 1
            if s % 5:
                row["repetition"] = rng.choice([1.0, 0.8, 1.7])
                row["presence"] = rng.uniform(-2, 2)
                row["frequency"] = rng.uniform(-2, 2)
        self.padding = [s for s in range(S) if s % 6 == 5]
        self.logits = rng.standard_normal((S, V)).astype(np.float32) * 3
        self.logits[::2, rng.integers(0, V)] = np.inf
        self.logits[1::2, rng.integers(0, V)] = np.nan
        self._make_lists()

    def _make_lists(self) -> None:
        rng, V = self.rng, self.V
        shape = (self.slots, MAX_BIAS)
        self.bias_tokens = rng.integers(0, V, shape).astype(np.int32)
        self.bias_values = np.full(shape, np.nan, np.float32)
        self.bias_until = np.full(shape, FOREVER, np.int32)
        self.words = rng.integers(0, V, (self.slots, MAX_WORDS, BAD_WORD_WORDS)).astype(np.int32)
        self.words[:, :, 1] = 1
        for s, slot in enumerate(self.slot):
            row, position = self.params[slot], len(self.tokens[s])
            count = min(V, int(rng.integers(0, MAX_BIAS // 2)))
            values = rng.uniform(-100, 100, count)
            self.bias_tokens[slot, :count] = rng.permutation(V)[:count]
            self.bias_values[slot, :count] = values
            # Of the same tokens some are forbidden too, with a limit before, at or after.
            self.bias_tokens[slot, count : 2 * count] = rng.integers(0, V, count)
            self.bias_values[slot, count : 2 * count] = -np.inf
            self.bias_until[slot, count : 2 * count] = position + rng.integers(-1, 2, count)
            row["num_bias"] = 2 * count
            row["num_bad_words"] = n = int(rng.integers(0, MAX_WORDS))
            for word in self.words[slot, :n]:
                length = int(rng.integers(1, 7))
                before = self.tokens[s][-length:]
                word[1] = len(before)
                word[2 : 2 + len(before)] = before
                if rng.random() < 0.3:
                    word[2] = (word[2] + 1) % V

    def arrays(self):
        """(dims, arrays) with counts as they are before the step, and garbage where a row joins."""
        rng, S = self.rng, self.S
        counts = np.zeros((self.slots, self.V), np.int32)
        history = rng.integers(0, self.V, (self.slots, HISTORY)).astype(np.int32)
        joins, ids, positions, slots = [], [], [], []
        for s in range(S):
            slot, tokens = self.slot[s], self.tokens[s]
            begin = len(tokens) - self.new[s]
            if s in self.padding:
                slots.append(-1), ids.append(0), positions.append(0)
                continue
            row = self.params[slot]
            if begin == 0:
                counts[slot] = rng.integers(0, 9, self.V)
                joins.append(slot)
            for position, token in enumerate(tokens[:begin]):
                count_one(counts, history, row, position, token)
            ids += tokens[begin:]
            positions += range(begin, len(tokens))
            slots += [slot] * self.new[s]
        edits = np.full((len(joins) + 3, ROW_WORDS), 1, np.int32)
        edits[: len(joins)] = as_words(self.params[joins])
        sample_slots = self.slot.copy()
        sample_slots[self.padding] = -1
        lengths = [0 if s in self.padding else len(t) for s, t in enumerate(self.tokens)]
        dims = {"T": len(ids), "S": S, "SLOTS": self.slots, "E": len(edits)}
        return dims, {
            "token_counts": counts,
            "row_history": history,
            "row_params": as_words(self.params),
            "row_bias_tokens": self.bias_tokens,
            "row_bias_values": self.bias_values,
            "row_bias_until": self.bias_until,
            "row_bad_words": self.words,
            "edit_counts": np.array([len(joins), 0], np.int32),
            "row_edits": edits,
            "token_ids": np.array(ids, np.int32),
            "positions": np.array(positions, np.int32),
            "token_slots": np.array(slots, np.int32),
            "sample_slots": sample_slots,
            "sample_positions": np.array(lengths, np.int32),
            "logits": self.logits,
        }

    def expected(self, dims, arrays):
        """Counts from the whole sequences; logits token by token in float32."""
        counts = arrays["token_counts"].copy()
        history = arrays["row_history"].copy()
        adjusted = arrays["logits"].copy()
        for s in range(self.S):
            if s in self.padding:
                continue
            slot, tokens = self.slot[s], self.tokens[s]
            row = self.params[slot]
            if row["counted"]:
                counts[slot] = 0
            for position, token in enumerate(tokens):
                count_one(counts, history, row, position, token)
            self._adjust(adjusted[s], slot, row, tokens)
        return {"token_counts": counts, "row_history": history, "adjusted": adjusted}

    def _adjust(self, out, slot, row, tokens):
        n, prompt_len = row["num_bias"], row["prompt_len"]
        current = [i for i in range(n) if len(tokens) < self.bias_until[slot, i]]
        for i in current:
            if self.bias_values[slot, i] > -np.inf:
                out[self.bias_tokens[slot, i]] += self.bias_values[slot, i]
        output = tokens[prompt_len:]
        if row["counted"]:
            for token in set(tokens):
                x = out[token]
                x = x / row["repetition"] if x > 0 else x * row["repetition"]
                x -= row["frequency"] * np.float32(output.count(token))
                out[token] = x - row["presence"] if token in output else x
        for i in current:
            if self.bias_values[slot, i] == -np.inf:
                out[self.bias_tokens[slot, i]] = -np.inf
        for last, length, *before in self.words[slot, : row["num_bad_words"]].tolist():
            if row["counted"] and len(output) >= length and output[-length:] == before[:length]:
                out[last] = -np.inf


def count_one(counts, history, row, position, token):
    if not row["counted"]:
        return
    if position < row["prompt_len"]:
        counts[row["slot"], token] |= IN_PROMPT
    else:
        counts[row["slot"], token] += 1
    history[row["slot"], position % HISTORY] = token


def uncounted_words(rows):
    """A row with bad words is a counted one: without counts there is no history to compare."""
    for s, slot in enumerate(rows.slot):
        if s in rows.padding or not rows.params["counted"][slot]:
            rows.params["num_bad_words"][slot] = 0
    return rows


@pytest.mark.parametrize(("S", "V"), [(1, 1), (7, 17), (33, 301), (33, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_reference(S, V, seed):
    rows = uncounted_words(Rows(S, V, seed))
    dims, arrays = rows.arrays()
    out = run_numpy(program(V), dims, arrays)
    for name, want in rows.expected(dims, arrays).items():
        np.testing.assert_array_equal(out[name], want, err_msg=name)


def one_row(V, tokens, num_prompt, **params):
    """A counted row whose whole sequence is computed in one step, and logits 1 - v / 2."""
    rows = Rows(1, V)
    rows.tokens, rows.new, rows.padding = [list(tokens)], [len(tokens)], []
    row = rows.params[rows.slot[0]]
    row["prompt_len"], row["num_bias"], row["num_bad_words"], row["counted"] = num_prompt, 0, 0, 1
    row["repetition"], row["presence"], row["frequency"] = 1, 0, 0
    for name, value in params.items():
        row[name] = value
    rows.logits[0] = 1 - np.arange(V) / 2
    return rows


def adjusted(rows):
    dims, arrays = rows.arrays()
    return run_numpy(program(rows.V), dims, arrays)["adjusted"][0].tolist()


def test_penalties_by_hand():
    rows = one_row(6, [0, 4, 4, 1, 4], 2)  # prompt 0 4, output 4 1 4
    assert adjusted(rows) == [1, 0.5, 0, -0.5, -1, -1.5]
    rows = one_row(6, [0, 4, 4, 1, 4], 2, repetition=2)
    assert adjusted(rows) == [0.5, 0.25, 0, -0.5, -2, -1.5], "the prompt counts"
    rows = one_row(6, [0, 4, 4, 1, 4], 2, presence=0.5)
    assert adjusted(rows) == [1, 0, 0, -0.5, -1.5, -1.5], "the prompt does not count"
    rows = one_row(6, [0, 4, 4, 1, 4], 2, frequency=0.5)
    assert adjusted(rows) == [1, 0, 0, -0.5, -2, -1.5], "each time counts"
    rows = one_row(6, [0, 4, 4, 1, 4], 2, repetition=2, presence=2, frequency=0.5, counted=0)
    assert adjusted(rows) == [1, 0.5, 0, -0.5, -1, -1.5], "not counted"


def test_biases_come_before_penalties_and_bans_end():
    rows = one_row(4, [3, 3], 1, repetition=2, num_bias=3)
    slot = rows.slot[0]
    rows.bias_tokens[slot, :3] = 3, 0, 1
    rows.bias_values[slot, :3] = 2.5, -np.inf, -np.inf
    rows.bias_until[slot, :3] = FOREVER, 3, 2
    # Position 2 is sampled: the ban of token 0 holds, that of token 1 is over.
    assert adjusted(rows) == [-np.inf, 0.5, 0, 1]


@pytest.mark.parametrize(
    ("before", "num_prompt", "forbidden"),
    [
        ([2], 1, True),
        ([1, 2], 1, True),
        ([2, 2], 1, False),
        ([1, 2], 6, True),
        ([1, 2], 7, False),  # the 1 is in the prompt
        ([3, 1, 4, 1, 1, 2], 2, True),
        ([3, 1, 4, 1, 1, 2], 3, False),
        ([5, 1, 4, 1, 1, 2], 1, False),
    ],
)
def test_bad_words_need_what_precedes_them_in_the_output(before, num_prompt, forbidden):
    rows = one_row(7, [5, 3, 3, 1, 4, 1, 1, 2], num_prompt, num_bad_words=1)
    rows.words[rows.slot[0], 0] = [6, len(before), *before, *[0] * (6 - len(before))]
    assert (adjusted(rows)[6] == -np.inf) == forbidden


def test_counting_step_by_step_equals_all_at_once():
    tokens = np.random.default_rng(0).integers(0, 9, 25).tolist()
    whole = one_row(9, tokens, 11)
    dims, arrays = whole.arrays()
    want = run_numpy(program(9), dims, arrays)
    state = {n: arrays[n] for n in ("token_counts", "row_history")}
    for begin, end in [(0, 4), (4, 15), *((i, i + 1) for i in range(15, 25))]:
        step = arrays | state | {n: arrays[n][begin:end] for n in ("token_ids", "positions")}
        step["token_slots"] = arrays["token_slots"][begin:end]
        step["edit_counts"] = np.array([int(begin == 0), 0], np.int32)
        out = run_numpy(program(9), dims | {"T": end - begin}, step)
        state = {n: out[n] for n in state}
    for name, value in state.items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


def test_constants_are_those_of_the_kernels():
    text = (cuda_src_dir() / "logit_adjust.cu").read_text()
    constants = {n: int(v) for n, v in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    assert constants == {
        "kThreads": logit_adjust.THREADS,
        "kChunk": logit_adjust.CHUNK,
        "kHistory": HISTORY,
        "kBadWordWords": BAD_WORD_WORDS,
    }
    assert "kInPrompt = 1 << 30;" in text and IN_PROMPT == 1 << 30


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1, 17, 4097, 49153])
@pytest.mark.parametrize("S", [1, 7, 33])
def test_kernels(device, S, V):
    rows = uncounted_words(Rows(S, V, seed=V))
    dims, arrays = rows.arrays()
    limits = {"S": S + 3, "T": dims["T"] + 3}
    got = run_cuda(device, program(V), dims, arrays, limits=limits)
    for name, want in rows.expected(dims, arrays).items():
        np.testing.assert_array_equal(got[name], want, err_msg=name)


@pytest.mark.gpu
def test_counting_a_long_chunk(device):
    """Many tokens of one row at once: each is counted, and of the history the last ones stay."""
    tokens = np.random.default_rng(1).integers(0, 50, 3000).tolist()
    rows = one_row(50, tokens, 1000, repetition=1.5, frequency=0.01)
    dims, arrays = rows.arrays()
    got = run_cuda(device, program(50), dims, arrays)
    for name, want in rows.expected(dims, arrays).items():
        np.testing.assert_array_equal(got[name], want, err_msg=name)
