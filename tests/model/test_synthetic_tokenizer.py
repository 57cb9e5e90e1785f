"""The synthetic tokenizer: bytes, distinct words, special ids."""

import time

from hypothesis import given
from hypothesis import strategies as st

from tinyvllm.model.synthetic_tokenizer import synthetic_tokenizer

SIZE = 128256
TOKENIZER = synthetic_tokenizer(SIZE, 128000, (128001, 128008, 128009))


@given(st.text())
def test_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode()) and TOKENIZER.decode(ids) == text


def test_every_id_has_a_text_of_its_own() -> None:
    words = [TOKENIZER.decode([i], skip_special_tokens=False) for i in range(256, SIZE)]
    assert len(set(words)) == SIZE - 256
    assert all(w.strip().isascii() for w in words)
    assert TOKENIZER.decode([72, 105, 256, 257, 258]) == "Hi ba be bi"
    assert TOKENIZER.vocab_size == SIZE


def test_special_ids() -> None:
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (128000, 128001)
    assert TOKENIZER.decode([128000, 65, 128009]) == "A"
    assert TOKENIZER.decode([65, 128009], skip_special_tokens=False) == "A<|128009|>"


def test_small_vocabulary_with_special_bytes() -> None:
    tokenizer = synthetic_tokenizer(512, 1, (2,))
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_built_at_once() -> None:
    start = time.perf_counter()
    synthetic_tokenizer(SIZE, 128000, (128001,)).decode([SIZE - 1])
    assert time.perf_counter() - start < 0.3
