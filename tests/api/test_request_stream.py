"""One request's rows joined, and its text made when it is taken."""

import asyncio
import random

from tinyvllm.api.request_stream import RequestStream
from tinyvllm.model.synthetic_tokenizer import SyntheticTokenizer
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
