"""The parameters that the device keeps for each row slot, as the 16 words of an edit."""

from __future__ import annotations

import numpy as np

# One row, as in cuda_src/include/row_params.cuh. What is switched off has the value given here.
ROW_PARAMS = np.dtype(
    [
        ("slot", np.int32),
        ("position", np.int32),  # in the sequence, of the next token to be computed
        ("token", np.int32),  # that token, where the device is to take it from the row state
        ("temperature", np.float32),  # 0: greedy
        ("seed", np.uint32, (2,)),  # low and high word
        ("top_k", np.int32),  # off: 0
        ("top_p", np.float32),  # off: 1
        ("min_p", np.float32),  # off: 0
        ("prompt_len", np.int32),
        ("repetition", np.float32),  # penalties; off: 1
        ("presence", np.float32),  # off: 0
        ("frequency", np.float32),  # off: 0
        ("num_bias", np.int32),  # valid entries of row_bias_tokens, _values and _until
        ("num_bad_words", np.int32),  # valid entries of row_bad_words
        ("counted", np.int32),  # 1: token_counts and row_history are kept for this row
    ]
)
ROW_WORDS = ROW_PARAMS.itemsize // 4


def new_row_params(num_rows: int) -> np.ndarray:
    """ROW_PARAMS [num_rows]: zeros, and everything switched off."""
    rows = np.zeros(num_rows, ROW_PARAMS)
    rows["top_p"] = rows["repetition"] = 1
    return rows


def as_row_params(words: np.ndarray) -> np.ndarray:
    """The int32 words [n, ROW_WORDS] seen as ROW_PARAMS [n], without a copy."""
    return words.view(ROW_PARAMS)[:, 0]


def as_words(rows: np.ndarray) -> np.ndarray:
    """ROW_PARAMS [n] seen as int32 words [n, ROW_WORDS], without a copy."""
    return rows.view(np.int32).reshape(len(rows), ROW_WORDS)
