"""A tokenizer for models without one: bytes, then one made-up word an id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinyvllm.model.tokenizer import Tokenizer, check_text

_NUM_BYTES = 256
_SYLLABLES = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]


class SyntheticTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes, every further id a word of its own; some ids may be special.

    A text is encoded as its bytes, so decode(encode(text)) is the text. Nothing is built: a word
    is a function of its id.
    """

    def __init__(
        self,
        vocab_size: int,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        special_ids: Iterable[int] = (),
    ) -> None:
        assert vocab_size >= _NUM_BYTES, vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._vocab_size = vocab_size
        self._special = {bos_token_id, eos_token_id, *special_ids} - {None}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's bytes; there is no beginning-of-text token to add."""
        check_text(text)
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts = (self._bytes(i) for i in ids if not (skip_special_tokens and i in self._special))
        return b"".join(parts).decode(errors="replace")

    def _bytes(self, i: int) -> bytes:
        if i in self._special:
            return b"<|%d|>" % i
        if i < _NUM_BYTES:
            return bytes((i,))
        return b" " + _word(i - _NUM_BYTES).encode()


def _word(number: int) -> str:
    """A pronounceable word, different for each number: its digits in base 80 as syllables."""
    word = ""
    while True:
        number, digit = divmod(number, len(_SYLLABLES))
        word = _SYLLABLES[digit] + word
        if number == 0:
            return word
        number -= 1  # bijective: without it "ba" and "baba" would both be zero


def synthetic_tokenizer(
    vocab_size: int,
    bos_token_id: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> SyntheticTokenizer:
    """The synthetic tokenizer of a configuration's vocabulary and special ids."""
    eos = eos_token_ids[0] if eos_token_ids else None
    return SyntheticTokenizer(vocab_size, bos_token_id, eos, eos_token_ids)
