"""One request's rows joined, and its text made when it is taken."""

import asyncio
import random

import pytest

from tinyvllm.api.request_stream import RequestStream
from tinyvllm.api.wire import Head
from tinyvllm.model.synthetic_tokenizer import SyntheticTokenizer
from tinyvllm.outputs import CompletionOutput
from tinyvllm.sampling_params import SamplingParams

TEXT = "naïve é😀漢字 \U0001f468\u200d\U0001f469\u200d\U0001f467 end"
TOKENIZER = SyntheticTokenizer(512)


def stream_of(params, tokenizer=TOKENIZER):
    return RequestStream(7, "x", ("p", [112]), params, tokenizer)


def row(index, ids, finish=None, text="", stop=None):
    return 7, index, ids, text, None, None, finish, stop


def test_text_is_the_same_however_tokens_are_gathered():
    ids = TOKENIZER.encode(TEXT)  # single bytes
    rng = random.Random(1)
    for _ in range(50):
        stream, texts = stream_of(SamplingParams(max_tokens=500)), []
        rest = list(ids)
        while rest:
            for _ in range(rng.randint(1, 4)):
                if rest:
                    token = rest.pop(0)
                    stream.add(row(0, [token], None if rest else "length"))
            texts.append(asyncio.run(stream.take()).outputs[0].text)
        assert "".join(texts) == TEXT and stream.finished
        assert "\ufffd" not in "".join(texts)


def test_the_engine_makes_text_only_for_stop_strings():
    assert not stream_of(SamplingParams()).command(0, True).params.detokenize
    stops = SamplingParams(stop=["x"])
    stream = stream_of(stops)
    assert stream.command(3, False).params == stops
    stream.add(row(0, [65], "stop", "from the engine", "x"))
    output = asyncio.run(stream.take()).outputs[0]
    assert (output.text, output.stop_reason) == ("from the engine", "x")


def test_a_request_ends_with_its_last_sequence():
    stream = stream_of(SamplingParams(n=2, temperature=1))
    stream.add(row(1, [65], "length"))
    first = asyncio.run(stream.take())
    assert not first.finished and [o.index for o in first.outputs] == [1]
    stream.add(row(0, [66]))
    stream.add(row(0, [67], "length"))
    last = asyncio.run(stream.take())
    assert last.finished and last.outputs[0].text == "BC"


def test_rows_that_wait_are_joined_and_come_with_what_is_known_of_the_request():
    stream = stream_of(SamplingParams(n=2, stop=["x"], logprobs=0, prompt_logprobs=0))
    stream.begin(Head(7, num_cached_tokens=5, prompt_logprobs=[None], queue_seconds=0.25))
    one, two, three = ({token: token / 10} for token in (65, 66, 67))
    stream.add((7, 1, [65], "A", -1.0, [one], None, None))
    stream.add((7, 0, [67], "C", -4.0, [three], None, None))
    stream.add((7, 1, [66], "B", -3.0, [two], "stop", "x"))
    news = asyncio.run(stream.take())
    assert (news.request_id, news.prompt, news.prompt_token_ids) == ("x", "p", [112])
    assert (news.num_cached_tokens, news.prompt_logprobs) == (5, [None])
    assert news.queue_seconds == 0.25 and not news.finished
    assert news.outputs == [
        CompletionOutput(0, "C", [67], -4.0, [three], None, None),
        CompletionOutput(1, "AB", [65, 66], -3.0, [one, two], "stop", "x"),
    ]
    stream.add((7, 0, [68], "D", -5.0, [one], "length", None))
    news = asyncio.run(stream.take())
    assert news.finished
    assert news.outputs == [CompletionOutput(0, "D", [68], -5.0, [one], "length", None)]


def test_an_error_ends_the_request_and_is_raised():
    stream = stream_of(SamplingParams(n=2))
    stream.fail(RuntimeError("the engine is gone"))
    assert stream.finished
    with pytest.raises(RuntimeError, match="the engine is gone"):
        asyncio.run(stream.take())
