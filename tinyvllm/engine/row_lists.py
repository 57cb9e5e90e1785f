"""The lists that the device keeps for a row: biases of single tokens, and bad words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tinyvllm.ops.logit_adjust import BAD_WORD_WORDS
from tinyvllm.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams
from tinyvllm.util import InputError

RowLists = dict[str, np.ndarray]  # the first elements of the slot's row, by the state's name
FOREVER = np.iinfo(np.int32).max


def row_lists(
    params: SamplingParams,
    *,
    num_prompt: int,
    stop_ids: Collection[int],
    bad_words: Sequence[Sequence[int]],
    vocab_size: int,
) -> RowLists:
    """What the device must know of a request whose sampler is "adjust"; {} if that is nothing.

    stop_ids: tokens that would end it, which `min_tokens` forbids at first.
    bad_words: token ids, from `bad_word_ids`.

    Raises InputError for a token that is none, and for more entries than there is room for.
    """
    biases = [(token, value, FOREVER) for token, value in (params.logit_bias or {}).items()]
    for token, _, _ in biases:
        if token >= vocab_size:
            raise InputError(f"logit_bias: token id {token}: must be from 0 to {vocab_size - 1}")
    if params.min_tokens:
        until = min(num_prompt + params.min_tokens, FOREVER)
        biases += [(token, -np.inf, until) for token in sorted(stop_ids) if token < vocab_size]
    biases += [(word[0], -np.inf, FOREVER) for word in bad_words if len(word) == 1]
    if len(biases) > MAX_LOGIT_BIAS:
        raise InputError(
            f"logit_bias, min_tokens and bad_words of one token name {len(biases)} tokens: "
            f"at most {MAX_LOGIT_BIAS}"
        )
    several = [word for word in bad_words if len(word) > 1]
    if len(several) > MAX_BAD_WORDS:
        raise InputError(
            f"bad_words of several tokens make {len(several)} sequences: at most {MAX_BAD_WORDS}"
        )
    lists: RowLists = {}
    if biases:
        tokens, values, untils = zip(*biases, strict=True)
        lists["row_bias_tokens"] = np.array(tokens, np.int32)
        lists["row_bias_values"] = np.array(values, np.float32)
        lists["row_bias_until"] = np.array(untils, np.int32)
    if several:
        words = np.zeros((len(several), BAD_WORD_WORDS), np.int32)
        for entry, word in zip(words, several, strict=True):
            *before, last = word
            entry[:2] = last, len(before)
            entry[2 : 2 + len(before)] = before
        lists["row_bad_words"] = words
    return lists
