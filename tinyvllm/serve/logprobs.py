"""Log-probabilities in the two forms that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.outputs import Logprob, TokenLogprobs

# JSON has no infinity; a token that cannot come has the least that vLLM reports.
_LEAST = -9999.0


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offset: int,
    count: int,
) -> dict[str, Any]:
    """The form of /v1/completions: parallel lists over the tokens.

    offset: characters of the text before the first token. count: most tokens to show for each.
    """
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, entry in zip(token_ids, entries, strict=True):
        text = tokenizer.decode([token], False) if entry is None else _text(entry[token])
        result["tokens"].append(text)
        result["token_logprobs"].append(None if entry is None else _value(entry[token]))
        result["top_logprobs"].append(
            None if entry is None else {_text(e): _value(e) for e in _shown(entry, token, count)}
        )
        result["text_offset"].append(offset)
        offset += len(text)
    return result


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], count: int
) -> dict[str, Any]:
    """The form of /v1/chat/completions: one object a token."""
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        top = sorted(entry.values(), key=lambda e: -e.logprob)[:count]
        content.append({**_object(entry[token]), "top_logprobs": [_object(e) for e in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobs | None]) -> list[Any]:
    """vLLM's form for a prompt: token id -> log-probability, rank and text."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in entry.items()
        }
        for entry in entries
    ]


def _shown(entry: TokenLogprobs, token: int, count: int) -> list[Logprob]:
    """The likeliest tokens, with the chosen one in any case."""
    top = sorted(entry.values(), key=lambda e: -e.logprob)[:count]
    return top if entry[token] in top else [entry[token], *top]


def _object(entry: Logprob) -> dict[str, Any]:
    text = _text(entry)
    return {"token": text, "logprob": _value(entry), "bytes": list(text.encode())}


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _value(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
