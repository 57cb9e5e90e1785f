"""How one request chooses its tokens and when it ends, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.config import check_bool, check_int, check_number, option
from tinyvllm.util import InputError

MAX_SEED = (1 << 63) - 1
MAX_LOGPROBS = 20
# Far above any use: here a distribution is uniform to float32's precision, and the limit keeps
# temperature * noise finite on the device.
MAX_TEMPERATURE = 1e6
MAX_PENALTY = 2.0  # of presence and frequency, either sign
MAX_REPETITION = 1000.0  # of the repetition penalty; the least is its inverse
MAX_BIAS = 100.0  # of one token's logit, either sign
# What the device has room for beside each row. The first is shared by logit_bias, the tokens that
# min_tokens forbids, and bad words of a single token.
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128  # of several tokens
MAX_BAD_WORD_TOKENS = 7

# Kinds of steps, each of which does what those before it do: no logits leave a "plain" one, so its
# sampling may be a part of the product that computes them.
SAMPLERS = ("plain", "filter", "adjust")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request; an option that is not listed here is a TypeError that names it.

    n: how many completions of the prompt.
    temperature: 0 takes the most likely token; above 0, logits are divided by it.
    top_k: only the k most likely tokens (and those as likely as the last); 0 or -1: all.
    top_p: of those, only the most likely ones that together have this probability.
    min_p: only tokens at least this likely relative to the most likely one.
    repetition_penalty: tokens of prompt and output: positive logits are divided by it, negative
        ones multiplied.
    presence_penalty, frequency_penalty: taken from the logits of output tokens, once and for each
        occurrence.
    logit_bias: token id -> what is added to its logit.
    bad_words: texts that the output must not contain.
    max_tokens: most tokens to generate; None means up to the engine's `max_model_len`.
    min_tokens: as many tokens come before one that would end the request.
    ignore_eos: go on after an end-of-sequence token.
    seed: with the position, fixes the request's random numbers; None derives one from the engine's.
    stop: texts that end the output; a single one may be a str. Kept as a tuple.
    stop_token_ids: generation ends after any of these; kept as a tuple.
    include_stop_str_in_output: leave the text that ended the output in it.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: False gives token ids only, and no text.
    logprobs, prompt_logprobs: how many of the most likely tokens to report for each generated or
        prompt token, besides the token itself; None reports nothing. Of the model's own
        distribution, before any of the above.

    Raises InputError, naming the option, the value and the limit.
    """

    n: int = option(1, "completions of the prompt")
    temperature: float = option(1.0, "logits are divided by it; 0: the likeliest token")
    top_p: float = option(1.0, "only the likeliest tokens with this probability together")
    top_k: int = option(0, "only so many of the likeliest tokens; 0: all")
    min_p: float = option(0.0, "only tokens this likely relative to the likeliest one")
    repetition_penalty: float = option(1.0, "divides logits of tokens seen, prompt included")
    presence_penalty: float = option(0.0, "subtracted from logits of tokens generated before")
    frequency_penalty: float = option(
        0.0, "subtracted once for each time that a token was generated"
    )
    logit_bias: Mapping[int, float] | None = option(None, "token id -> added to logit", cli=False)
    bad_words: Sequence[str] = option((), "texts that the output must not contain")
    max_tokens: int | None = option(16, "most tokens to generate")
    min_tokens: int = option(0, "tokens that come before one may end the output")
    ignore_eos: bool = option(False, "go on after an end-of-sequence token")
    seed: int | None = option(None, "fixes the random numbers (default: drawn from the engine's)")
    stop: Sequence[str] = option((), "texts that end the output")
    stop_token_ids: Sequence[int] = option((), "token ids that end the output")
    include_stop_str_in_output: bool = option(False, "leave the stop text in the output")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    detokenize: bool = option(True, "make text of the tokens")
    logprobs: int | None = option(None, "how many of the likeliest tokens to report for each token")
    prompt_logprobs: int | None = option(None, "how many to report for each token of the prompt")

    def __post_init__(self) -> None:
        self._check_choice_of_tokens()
        self._check_adjustments()
        self._check_end()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)

    def _check_choice_of_tokens(self) -> None:
        check_int("n", self.n, 1, None)
        check_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        if self.n > 1 and self.greedy:
            raise InputError(f"n={self.n}: must be 1 with temperature=0: all would be the same")
        check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InputError(f"top_p={self.top_p}: must be above 0 and at most 1")
        check_int("top_k", self.top_k, -1, (1 << 31) - 1)
        check_number("min_p", self.min_p, 0, 1)

    def _check_adjustments(self) -> None:
        least = 1 / MAX_REPETITION
        check_number("repetition_penalty", self.repetition_penalty, least, MAX_REPETITION)
        check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InputError(f"logit_bias={self.logit_bias!r}: must map token ids to numbers")
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InputError(
                    f"logit_bias has {len(self.logit_bias)} entries: at most {MAX_LOGIT_BIAS}"
                )
            for token, value in self.logit_bias.items():
                check_int("logit_bias: token id", token, 0, None)
                check_number(f"logit_bias[{token}]", value, -MAX_BIAS, MAX_BIAS)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._keep_tuple("bad_words", _texts("bad_words", self.bad_words))

    def _check_end(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._keep_tuple("stop", () if stop is None else _texts("stop", stop))
        check_bool("detokenize", self.detokenize)
        if self.stop and not self.detokenize:
            raise InputError(f"stop={self.stop!r}: needs detokenize=True to see the text")
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise InputError(
                f"stop_token_ids={self.stop_token_ids!r}: must be a list or tuple of token ids"
            )
        for i, token in enumerate(self.stop_token_ids):
            check_int(f"stop_token_ids[{i}]", token, 0, None)
        self._keep_tuple("stop_token_ids", self.stop_token_ids)

    def _keep_tuple(self, name: str, values: Sequence[Any]) -> None:
        object.__setattr__(self, name, tuple(values))  # the class is frozen for others

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken, without random numbers."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """True when logits depend on the tokens so far."""
        added = self.presence_penalty != 0 or self.frequency_penalty != 0
        return added or self.repetition_penalty != 1

    @property
    def counted(self) -> bool:
        """True when the device must follow the tokens of this request from the first one on."""
        return self.penalised or bool(self.bad_words)

    @property
    def sampler(self) -> str:
        """The least of SAMPLERS that can do what this request asks for."""
        if self.counted or self.logit_bias or self.min_tokens:
            return "adjust"
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        if (filtered and not self.greedy) or self.logprobs is not None:
            return "filter"
        return "plain"


def bad_word_ids(
    words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> list[tuple[int, ...]]:
    """Token ids of the words, as they are at the start of a text and as they are after a space.

    `encode` makes token ids of a text without special tokens. As in vLLM the second form counts
    where the space becomes part of the first token: as many tokens, the first of them another.
    """
    found: list[tuple[int, ...]] = []
    for i, word in enumerate(words):
        bare = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        forms = [bare]
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            forms.append(spaced)
        for ids in forms:
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                raise InputError(
                    f"bad_words[{i}]={word!r} has {len(ids)} tokens: "
                    f"must have from 1 to {MAX_BAD_WORD_TOKENS}"
                )
        found += forms
    return found


def _texts(name: str, values: Any) -> Sequence[str]:
    """The texts, if they are some: a list or tuple of str that are not empty."""
    if not isinstance(values, (list, tuple)):
        raise InputError(f"{name}={values!r}: must be a list or tuple of texts")
    for i, text in enumerate(values):
        if not isinstance(text, str):
            raise InputError(f"{name}[{i}]={text!r}: must be a text")
        if not text:
            raise InputError(f"{name}[{i}]={text!r}: must not be empty")
    return values
