"""What a request returns to its caller, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token; `rank` counts from 1, the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: token id -> its log-probability, for the token there and the requested top ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request, finished or so far.

    cumulative_logprob: sum over the generated tokens; None unless logprobs were asked for.
    logprobs: one entry a generated token; None unless asked for.
    finish_reason: "stop", "length", "abort" or, when the device failed this request alone, "error";
        None while it runs.
    stop_reason: the id in `stop_token_ids` or the string in `stop` that ended it; the message of
        an error; else None.
    With `LLM.stream` text, token_ids and logprobs are only what is new.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request with its outputs.

    prompt: its text, or None when it was given as token ids.
    num_cached_tokens: tokens of the prompt whose K and V came from the prefix cache.
    queue_seconds: how long it waited for its first step; None where nobody measures it, as in
        `LLM`.
    prompt_logprobs: one entry a prompt token, of which the first is None (nothing precedes it);
        None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
