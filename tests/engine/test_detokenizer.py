"""Detokenizer against a plain search of the whole text after each token."""

from dataclasses import dataclass

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from tinyvllm.engine.detokenizer import Detokenizer
from tinyvllm.model.synthetic_tokenizer import SyntheticTokenizer
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.sampling_params import SamplingParams

PIECES = ["a", "b", "c", "ab", "ba", "aab", "abc", "é", "\n\n", "<end>"]
END = PIECES.index("<end>")
BYTES = SyntheticTokenizer(300, special_ids=[299])


def pieces_tokenizer() -> Tokenizer:
    """Each piece is a token and nothing stands between tokens; <end> is special."""
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.add_special_tokens(["<end>"])
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, None, END)


TOKENIZER = pieces_tokenizer()


def push_all(
    detokenizer: Detokenizer, ids: list[int], sizes: list[int], finish_reason: str = "length"
) -> list[str]:
    """Deltas for pushes of these sizes (the last repeats); the last push has the finish reason."""
    deltas, start = [], 0
    while start < len(ids) and detokenizer.stop_reason is None:
        size = sizes[min(len(deltas), len(sizes) - 1)]
        last = start + size >= len(ids)
        deltas.append(detokenizer.push(ids[start : start + size], finish_reason if last else None))
        start += size
    return deltas


def reference(
    ids: list[int], stop: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens: the first token in whose text a string ends."""
    text = ""
    for n, i in enumerate(ids, 1):
        before, text = len(text), text + PIECES[i]
        for s in stop if n > min_tokens else []:
            for k in range(len(text)):
                if text.startswith(s, k) and k + len(s) > before:
                    return text[: k + len(s)] if include else text[:k], s, n
    return text, None, len(ids)


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.integers(0, END - 1), min_size=1, max_size=30),
    stop=st.lists(st.text("abcé\n", min_size=1, max_size=5), max_size=3, unique=True),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9),
)
def test_stop_strings(
    ids: list[int], stop: list[str], include: bool, min_tokens: int, sizes: list[int]
) -> None:
    params = SamplingParams(
        stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99
    )
    detokenizer = Detokenizer(TOKENIZER, [0], params)
    text, stop_reason, num_tokens = reference(ids, stop, include, min_tokens)
    deltas = push_all(detokenizer, ids, sizes)
    assert (detokenizer.text, detokenizer.stop_reason) == (text, stop_reason)
    assert detokenizer.num_tokens == num_tokens
    assert "".join(deltas) == text  # nothing was shown that the stop string took back


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams(stop=["abac", "ca\n"]))
    pushed = [detokenizer.push([PIECES.index(p)]) for p in ("a", "b", "ab", "ab", "c", "a", "c")]
    #         a   ab  abab   ababab  ...c  ca: of the other  cac
    assert pushed == ["", "", "ab", "ab", "ab", "", "ca"]  # fmt: skip
    assert detokenizer.push([], "abort") == "c" and detokenizer.text == "abababcac"


def test_included_stop_strings_are_not_held_back() -> None:
    params = SamplingParams(stop=["bc"], include_stop_str_in_output=True)
    detokenizer = Detokenizer(TOKENIZER, [], params)
    assert [detokenizer.push([i]) for i in (0, 1, PIECES.index("c"))] == ["a", "b", "c"]
    assert detokenizer.stop_reason == "bc" and detokenizer.push([0], "length") == ""
    assert detokenizer.text == "abc"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip_special", [False, True])
def test_token_that_ended_the_sequence(include: bool, skip_special: bool) -> None:
    params = SamplingParams(
        include_stop_str_in_output=include, skip_special_tokens=skip_special, stop_token_ids=[2]
    )

    def text(ids: list[int], finish_reason: str) -> str:
        return Detokenizer(TOKENIZER, [], params).push(ids, finish_reason)

    assert text([0, 2], "stop") == ("ac" if include else "a")
    assert text([0, END], "stop") == ("a<end>" if include and not skip_special else "a")
    # Only the last token is left out, and only for this reason.
    assert text([0, END, 1], "length") == ("ab" if skip_special else "a<end>b")


def test_no_text_without_detokenize() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams(detokenize=False))
    assert detokenizer.push([0, 1]) == detokenizer.push([0], "length") == detokenizer.text == ""


def test_unfinished_characters() -> None:
    """They wait for their last byte, and come out broken at the end."""
    first, second = "é".encode()
    detokenizer = Detokenizer(BYTES, [65], SamplingParams(stop=["é!"]))
    deltas = [detokenizer.push([i]) for i in (66, first, second, 66, first)]
    assert deltas == ["B", "", "", "éB", ""]
    assert detokenizer.push([], "length") == "\ufffd"


@dataclass
class CountingTokenizer(SyntheticTokenizer):
    """Counts the tokens that it decodes."""

    decoded: int = 0

    def __post_init__(self) -> None:
        super().__init__(300)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


def test_all_at_once_is_decoded_once() -> None:
    tokenizer = CountingTokenizer()
    detokenizer = Detokenizer(tokenizer, [65] * 1000, SamplingParams())
    assert detokenizer.push([66] * 1000, "length") == "B" * 1000
    assert tokenizer.decoded < 1050
