"""The lists of a row: biases, bans for a time, bad words, and their limits."""

import numpy as np
import pytest

from tinyvllm.engine.row_lists import FOREVER, row_lists
from tinyvllm.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams
from tinyvllm.util import InputError


def lists(bad_words=(), stop_ids=(), vocab_size=100, **options):
    return row_lists(
        SamplingParams(**options),
        num_prompt=7,
        stop_ids=stop_ids,
        bad_words=bad_words,
        vocab_size=vocab_size,
    )


def test_a_request_that_asks_for_none_has_none():
    assert lists(stop_ids=[1, 2]) == {}


def test_biases_bans_and_single_bad_words_share_a_list():
    found = lists(
        logit_bias={5: 2.5, 99: -100},
        min_tokens=3,
        max_tokens=9,
        stop_ids={30, 4, 100},  # the last is no token of this vocabulary
        bad_words=[(8,), (1, 2)],
    )
    assert found["row_bias_tokens"].tolist() == [5, 99, 4, 30, 8]
    assert found["row_bias_values"].tolist() == [2.5, -100, -np.inf, -np.inf, -np.inf]
    assert found["row_bias_until"].tolist() == [FOREVER, FOREVER, 10, 10, FOREVER]
    assert found["row_bad_words"].tolist() == [[2, 1, 1, 0, 0, 0, 0, 0]]
    assert [a.dtype for a in found.values()] == [np.int32, np.float32, np.int32, np.int32]


def test_a_ban_that_no_sequence_outlives_is_for_ever():
    for min_tokens in (FOREVER - 7, FOREVER, 1 << 40, 10**30):
        found = lists(min_tokens=min_tokens, max_tokens=None, stop_ids=[4])
        assert found["row_bias_until"].tolist() == [FOREVER]


def test_a_bad_word_is_its_last_token_and_what_precedes_it():
    found = lists(bad_words=[(1, 2, 3), (1, 2, 3, 4, 5, 6, 7)])
    assert set(found) == {"row_bad_words"}
    assert found["row_bad_words"].tolist() == [[3, 2, 1, 2, 0, 0, 0, 0], [7, 6, 1, 2, 3, 4, 5, 6]]


def test_limits():
    many = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    assert len(lists(logit_bias=many, vocab_size=5000)["row_bias_tokens"]) == MAX_LOGIT_BIAS
    with pytest.raises(InputError, match=f"name 1025 tokens: at most {MAX_LOGIT_BIAS}"):
        lists(logit_bias=many, min_tokens=1, stop_ids=[2], vocab_size=5000)
    with pytest.raises(InputError, match="token id 100: must be from 0 to 99"):
        lists(logit_bias={100: 1})
    assert len(lists(bad_words=[(1, 2)] * MAX_BAD_WORDS)["row_bad_words"]) == MAX_BAD_WORDS
    with pytest.raises(InputError, match=f"129 sequences: at most {MAX_BAD_WORDS}"):
        lists(bad_words=[(1, 2)] * (MAX_BAD_WORDS + 1))
