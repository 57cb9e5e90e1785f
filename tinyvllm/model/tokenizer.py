"""Text to token ids and back, and the text of a growing output without broken characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tinyvllm.model.config import read_json
from tinyvllm.util import InputError

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that the first output token is decoded behind: decoders look at the
# neighbour only (a leading space is stripped at the start of a text).
_CONTEXT_TOKENS = 6
# Characters from which on a text is better encoded in a thread of its own.
LONG_TEXT = 10_000
# Tokens that may wait for the rest of a character. One character has at most 4 bytes.
_MAX_HELD = 16


class Tokenizer:
    """A tokenizer of the tokenizers library, with the ids that begin and end a text."""

    def __init__(
        self, backend: tokenizers.Tokenizer, bos_token_id: int | None, eos_token_id: int | None
    ) -> None:
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id

    @classmethod
    def from_file(cls, directory: Path | str) -> Tokenizer:
        """Read `tokenizer.json` and, for the names of BOS and EOS, `tokenizer_config.json`."""
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{path}: does not exist")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise InputError(f"{path}: not a valid tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config_path = path.with_name("tokenizer_config.json")
        config = read_json(config_path) if config_path.exists() else {}
        bos, eos = (_named_token(backend, config, key) for key in ("bos_token", "eos_token"))
        return cls(backend, bos, eos)

    @property
    def vocab_size(self) -> int:
        """Number of ids, those of added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens in the text are recognised."""
        check_text(text)
        if len(text) < LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # this one lets other threads run meanwhile; megabytes take seconds
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat: templates write the special tokens themselves, so none is
        added (and no BOS comes twice)."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def check_text(text: str) -> None:
    """InputError if the text holds half of a surrogate pair, which UTF-8 cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text: character {error.start} is the lone surrogate {text[error.start]!r}"
        ) from error


def _named_token(backend: tokenizers.Tokenizer, config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return backend.token_to_id(value) if isinstance(value, str) else None


class IncrementalDecoder:
    """The text of an output that grows token by token.

    Joined, the deltas are the output decoded behind the prompt. Text that ends in U+FFFD is held
    back, since the next token may complete the character. Each push decodes only a window of the
    last tokens: the first `_read` of them are context whose text is out, the others wait.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._window)

    def push(self, ids: Sequence[int]) -> str:
        """Text that these tokens complete; "" while a character is unfinished."""
        self._window += ids
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._emit(len(self._window), text)
        if len(self._window) - self._read <= _MAX_HELD:
            return ""
        cut = self._clean_cut(text)
        return self._emit(cut, self._decode(self._window[:cut]))

    def flush(self) -> str:
        """Whatever is held back, at the end of the output."""
        if self._read == len(self._window):
            return ""
        return self._emit(len(self._window), self._decode(self._window))

    def _emit(self, read: int, text: str) -> str:
        """New text of the window's tokens up to `read`, which become the context of the next.

        `text`: these tokens decoded, the context included.
        """
        known = self._decode(self._window[: self._read])
        if not text.startswith(known):
            # The prompt ended inside a character: the output completes it and shows it whole.
            known = known.rstrip(_REPLACEMENT)
        delta = text[len(known) :]
        # Skipped tokens are no context: a decoder would take what follows for a text's start.
        if delta or read > _MAX_HELD:
            self._window = self._window[self._read :]
            read -= self._read
        self._read = read
        return delta

    def _clean_cut(self, text: str) -> int:
        """Last place in a long broken run where no character goes on, as a number of tokens."""
        for cut in range(len(self._window) - 1, self._read, -1):
            if self._decode(self._window[:cut]) + self._decode(self._window[cut:]) == text:
                return cut
        return len(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)
