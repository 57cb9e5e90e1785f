"""Tokenizer files, and the incremental decoder on text cut anywhere."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from tinyvllm.model.gguf_file import GgufFile
from tinyvllm.model.gguf_tokenizer import build_tokenizer
from tinyvllm.model.synthetic_tokenizer import SyntheticTokenizer
from tinyvllm.model.tokenizer import LONG_TEXT, IncrementalDecoder, Tokenizer
from tinyvllm.util import InputError

TEXTS = [
    "plain text",
    "héllo wörld",
    "日本語のテキスト、漢字と仮名",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 thumb",
    "é combining, ẛ̣ two of them",
    "mixed \U0001d518\U0001d52b \U0001f9ea done",
    "a genuine \ufffd in \ufffd\ufffd text",
    "العربية עברית हिन्दी",
]
BYTES = SyntheticTokenizer(300)


def test_from_file(golden: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(golden / "mistral")
    assert tokenizer.vocab_size == 512
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text.encode())
    shutil.copy(golden / "mistral" / "tokenizer.json", tmp_path)
    assert Tokenizer.from_file(tmp_path).eos_token_id is None


def test_a_long_text_is_the_same_and_lets_other_threads_run(golden: Path) -> None:
    tokenizer = Tokenizer.from_file(golden / "mistral")
    text = " ".join(TEXTS) * 2000
    assert len(text) > LONG_TEXT
    done = threading.Event()
    turns = 0

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    ids = tokenizer.encode(text)
    done.set()
    thread.join()
    assert turns >= 5
    assert ids == tokenizer._backend.encode(text).ids


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json: does not exist"):
        Tokenizer.from_file(tmp_path)
    for content in (b"", b"{}", b"\xff", b'{"model": 5}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer\.json: not a valid tokenizer"):
            Tokenizer.from_file(tmp_path)


def test_lone_surrogates(golden: Path) -> None:
    with pytest.raises(InputError, match=r"character 1 is the lone surrogate '\\ud83d'"):
        Tokenizer.from_file(golden / "mistral").encode("a\ud83d")


def test_encode_chat_adds_no_second_bos(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(golden / "mistral" / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    backend.save(str(path))
    shutil.copy(golden / "mistral" / "tokenizer_config.json", tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.encode("<s>A") == [1, 1, 35]  # why there is encode_chat
    assert tokenizer.encode_chat("<s>A") == [1, 35]
    assert tokenizer.encode_chat("A") == [35], "the template decides"


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int]) -> list[str]:
    """Deltas of an output that comes in pieces of these sizes (the last size repeats)."""
    decoder = IncrementalDecoder(tokenizer, prompt)
    deltas, start = [], 0
    while start < len(ids):
        size = sizes[min(len(deltas), len(sizes) - 1)]
        deltas.append(decoder.push(ids[start : start + size]))
        start += size
    return [*deltas, decoder.flush()]


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)),
    prompt=st.one_of(st.just(""), st.sampled_from(TEXTS)),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20),
)
def test_deltas_join_to_the_text(text: str, prompt: str, sizes: list[int]) -> None:
    deltas = stream(BYTES, BYTES.encode(prompt), BYTES.encode(text), sizes)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta for delta in deltas)


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(max_size=120),
    tail=st.text(max_size=5),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20),
)
def test_broken_bytes_come_out_as_in_one_piece(data: bytes, tail: str, sizes: list[int]) -> None:
    ids = [*data, *tail.encode()]
    assert "".join(stream(BYTES, [65], ids, sizes)) == BYTES.decode(ids)


def test_merged_tokens_of_a_real_vocabulary(smollm2_gguf: Path) -> None:
    tokenizer = build_tokenizer(GgufFile.parse(smollm2_gguf))
    rng = np.random.default_rng(3)
    prompt = tokenizer.encode("Say:")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for _ in range(20):
            deltas = stream(tokenizer, prompt, ids, rng.integers(1, 4, 9).tolist())
            assert "".join(deltas) == text
    # Special tokens in the output leave no trace, and random ids end as they would in one piece.
    ids = rng.integers(0, 49152, 400).tolist()
    whole = tokenizer.decode(prompt + ids)
    assert "Say:" + "".join(stream(tokenizer, prompt, ids, [1])) == whole


def test_character_that_the_prompt_began() -> None:
    first, *rest = BYTES.encode("é")
    assert stream(BYTES, [65, first], [*rest, 66], [1]) == ["é", "B", ""]
    assert "".join(stream(BYTES, [65, first], [66], [1])) == "B"


def test_leading_spaces_of_a_sentencepiece_decoder() -> None:
    """Its decoder strips the space of a text's start, so deltas must be decoded in context."""
    vocab = {"<s>": 0, "▁Hello": 1, "▁world": 2, "<0xC3>": 3, "<0xA9>": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer = Tokenizer(backend, 0, None)
    ids = [1, 2, 0, 0, 2, 3, 4, 2]
    assert stream(tokenizer, [1], ids, [1])[:-1] == [
        " Hello", " world", "", "", " world", "", "é", " world",
    ]  # fmt: skip


def test_cost_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    decode = BYTES.decode

    def counting(ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(BYTES, "decode", counting)
    for ids in ([97] * 2000, [0x80] * 2000, [0xF0, 0x9F] * 1000, list("日本".encode()) * 300):
        stream(BYTES, [65] * 1000, ids, [1])
    assert longest < 64
