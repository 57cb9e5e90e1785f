"""How one request chooses its tokens and when it ends, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.config import option
from tinyvllm.util import InputError

MAX_SEED = (1 << 63) - 1
MAX_LOGPROBS = 20
# Far above any use: here a distribution is uniform to float32's precision, and the limit keeps
# temperature * noise finite on the device.
MAX_TEMPERATURE = 1e6


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request; an option that is not listed here is a TypeError that names it.

    temperature: 0 takes the most likely token; above 0, logits are divided by it.
    max_tokens: most tokens to generate; None means up to the engine's `max_model_len`.
    ignore_eos: go on after an end-of-sequence token.
    seed: with the position, fixes the request's random numbers; None derives one from the engine's.
    logprobs, prompt_logprobs: how many of the most likely tokens to report for each generated or
        prompt token, besides the token itself; None reports nothing.
    stop_token_ids: generation ends after any of these; kept as a tuple.

    Raises InputError, naming the option, the value and the limit.
    """

    temperature: float = option(1.0, "0 takes the likeliest token; above, logits are divided")
    max_tokens: int | None = option(16, "most tokens to generate")
    ignore_eos: bool = option(False, "go on after an end-of-sequence token")
    seed: int | None = option(None, "fixes the random numbers (default: one from the engine's)")
    logprobs: int | None = option(None, "likeliest tokens to report for each token")
    prompt_logprobs: int | None = option(None, "the same for tokens of the prompt")
    stop_token_ids: Sequence[int] = option((), "ids after any of which it ends")

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos={self.ignore_eos!r}: must be True or False")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise InputError(
                f"stop_token_ids={self.stop_token_ids!r}: must be a list or tuple of token ids"
            )
        for i, token in enumerate(self.stop_token_ids):
            _check_int(f"stop_token_ids[{i}]", token, 0, None)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken, without random numbers."""
        return self.temperature == 0


def _check_temperature(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"temperature={value!r}: must be a number")
    if not 0 <= value <= MAX_TEMPERATURE:  # False for NaN too
        raise InputError(f"temperature={value}: must be from 0 to {MAX_TEMPERATURE:g}")


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}={value!r}: must be an integer")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"{name}={value}: must be {limit}")
