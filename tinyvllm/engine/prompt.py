"""What callers may give as a prompt, as its text and its token ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.util import InputError, short_repr


def tokenize(tokenizer: Tokenizer, request_id: str, prompt: Any) -> tuple[str | None, list[int]]:
    """Text and token ids of a prompt: text, or {"prompt_token_ids": [...]}, which has no text.

    InputError, naming the request, for anything else.
    """
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
        ids = prompt["prompt_token_ids"]
        if isinstance(ids, np.ndarray) and ids.ndim == 1:
            ids = ids.tolist()
        if isinstance(ids, (list, tuple)):
            return None, list(ids)
    raise InputError(
        f"request {request_id!r}: a prompt is text or {{'prompt_token_ids': [ids]}}, "
        f"not {short_repr(prompt)}"
    )
