"""Tokenizers rebuilt from GGUF metadata: golden ids, pre-tokenizers, and metadata that lie."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from tinyvllm.model.gguf_file import GgufFile
from tinyvllm.model.gguf_tokenizer import build_tokenizer
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.util import InputError

Writer = Callable[..., Path]


def test_golden_texts(smollm2_gguf: Path, golden: Path) -> None:
    tokenizer = build_tokenizer(GgufFile.parse(smollm2_gguf))
    with open(golden / "smollm2_tokenizer.jsonl", encoding="utf-8", newline="\n") as file:
        lines = [json.loads(line) for line in file]
    assert len(lines) == 66
    for line in lines:
        ids = tokenizer.encode(line["text"])
        assert ids == line["ids"], line["text"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == line["decoded"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == line["decoded_skip_special"]
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def tiny(write_gguf: Writer, **changes: object) -> Tokenizer:
    return build_tokenizer(GgufFile.parse(write_gguf(**changes)))


def test_merges_and_special_tokens(write_gguf: Writer) -> None:
    tokenizer = tiny(write_gguf)
    hel, he = 261, 260
    assert tokenizer.encode("hel") == [hel]
    assert tokenizer.encode("heh") == [he, 4 + ord("h")]
    assert tokenizer.encode("a</s><|eot_id|>") == [4 + ord("a"), 2, 3]
    assert tokenizer.decode([1, hel, 2]) == "hel"
    assert tokenizer.decode([1, hel, 2], skip_special_tokens=False) == "<s>hel</s>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 12\n\n3", ["a", "Ġ", "1", "2", "ĊĊ", "3"]),
        ("gpt-2", "it's  1234 x", ["it", "'s", "Ġ", "Ġ1234", "Ġx"]),
        ("llama-bpe", "it's  1234 x\n\n y", ["it", "'s", "Ġ", "Ġ", "123", "4", "Ġx", "ĊĊ", "Ġy"]),
        ("default", "a+b 1234", ["a", "+", "b", "Ġ", "123", "4"]),
    ],
)
def test_pre_tokenizers(write_gguf: Writer, pre: str, text: str, pieces: list[str]) -> None:
    """Pieces, within which alone merges happen; `default` is llama.cpp's fallback."""
    tokenizer = tiny(write_gguf, pre=pre)
    found = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces


def test_beginning_of_text(write_gguf: Writer) -> None:
    assert tiny(write_gguf, pre="llama-bpe").encode("hel") == [1, 261]
    assert tiny(write_gguf, pre="llama-bpe").encode("hel", add_special_tokens=False) == [261]
    assert tiny(write_gguf, pre="smollm").encode("hel") == [261]
    explicit = tiny(write_gguf, change=lambda w: w.add_add_bos_token(True))
    assert explicit.encode("hel") == [1, 261]


def replaced(name: str, value: object) -> Callable[[gguf.GGUFWriter], None]:
    """Changes a metadata value that the writer already has."""

    def change(writer: gguf.GGUFWriter) -> None:
        key = f"tokenizer.ggml.{name}"
        old = writer.kv_data[0][key]
        writer.kv_data[0][key] = type(old)(value, old.type)

    return change


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "llama", "model='llama': only 'gpt2'"),
        ("pre", "tekken", "pre='tekken': must be one of smollm"),
        ("merges", ["h e", "q z"], "merges: 'q z' does not join"),
        ("merges", ["hel"], "'hel' does not join"),
        ("tokens", ["x"] * 262, "twice"),
        ("tokens", [1, 2, 3], "array of strings"),
        ("token_type", [1, 2], "262 integers"),
        ("token_type", [9] * 262, "from 1 to 6"),
        ("bos_token_id", 400, "bos_token_id=400: must be below 262"),
    ],
)
def test_lying_metadata(write_gguf: Writer, name: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny(write_gguf, change=replaced(name, value))
