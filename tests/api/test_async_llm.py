"""Many requests at once over an engine in a process of its own."""

import asyncio
import os
import signal

import pytest

from tinyvllm import LLM, AsyncLLM, SamplingParams
from tinyvllm.api.async_llm import EngineDeadError
from tinyvllm.util import InputError

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
OPTIONS = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() if hasattr(asyncio, "Runner") else _Runner() as runner:
        yield runner


class _Runner:
    """asyncio.Runner for Python 3.10."""

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        return self

    def run(self, work):
        return self._loop.run_until_complete(work)

    def __exit__(self, *error):
        self._loop.close()


@pytest.fixture(scope="module")
def llm(golden, loop):
    async def opened():
        llm = AsyncLLM(str(golden / "llama_bias"), **OPTIONS)
        await llm.ready()
        return llm

    async def closed(llm):
        llm.shutdown()

    llm = loop.run(opened())
    yield llm
    loop.run(closed(llm))
    assert llm._process.process.returncode == 0 and llm.is_stopped


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "llm" in request.fixturenames:
        llm, loop = (request.getfixturevalue(name) for name in ("llm", "loop"))
        loop.run(idle(llm))


async def idle(llm):
    """Waits until the engine says that all is free."""
    assert llm._requests == {} and llm._by_id == {}
    for _ in range(100):
        stats = await llm.get_stats()
        if not stats["kv_blocks_used"] and not stats["num_requests_running"]:
            return
    raise AssertionError(stats)


def ids(prompt):
    return {"prompt_token_ids": prompt}


async def collect(llm, prompt, params, name, **options):
    return [o async for o in llm.generate(prompt, params, name, **options)]


def test_streams_and_whole_outputs_are_those_of_llm(llm, loop, cases):
    async def both():
        jobs = [
            collect(llm, ids(prompt), GREEDY, f"{stream}.{i}", stream=stream)
            for i, (prompt, _) in enumerate(cases)
            for stream in (True, False)
        ]
        return await asyncio.gather(*jobs)

    results = loop.run(both())
    for (prompt, want), streamed, (whole,) in zip(cases, results[::2], results[1::2], strict=True):
        assert whole.outputs[0].token_ids == want and whole.finished
        assert [t for o in streamed for t in o.outputs[0].token_ids] == want
        assert "".join(o.outputs[0].text for o in streamed) == whole.outputs[0].text
        assert [o.finished for o in streamed] == [False] * (len(streamed) - 1) + [True]
        assert whole.prompt_token_ids == prompt and whole.outputs[0].finish_reason == "length"
        assert 0 <= whole.queue_seconds < 10


def test_everything_that_llm_returns_comes_through(llm, loop, golden):
    params = SamplingParams(
        n=2, temperature=1, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, stop=["zzz"]
    )
    (whole,) = loop.run(collect(llm, "abc", params, "all", stream=False))
    with LLM(str(golden / "llama_bias"), **OPTIONS) as reference:
        (want,) = reference.generate("abc", params)
    for got, expected in zip(whole.outputs, want.outputs, strict=True):
        assert got.token_ids == expected.token_ids and got.text == expected.text
        assert got.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
        assert [list(p) for p in got.logprobs] == [list(p) for p in expected.logprobs]
        assert got.finish_reason == expected.finish_reason
    assert whole.prompt == "abc" and len(whole.prompt_logprobs) == len(want.prompt_logprobs)


def test_a_slow_reader_gets_several_tokens_at_once(llm, loop):
    async def slow():
        lengths = []
        async for output in llm.generate("ab", GREEDY, "slow"):
            lengths.append(len(output.outputs[0].token_ids))
            await asyncio.sleep(0.3)
        return lengths

    lengths = loop.run(slow())
    assert sum(lengths) == 16 and len(lengths) < 16


def test_leaving_the_loop_ends_the_request(llm, loop):
    async def leave():
        stream = llm.generate("ab", SamplingParams(max_tokens=2000, ignore_eos=True), "left")
        await anext(stream)
        await stream.aclose()

    loop.run(leave())


def test_abort_ends_a_request_with_what_there_is(llm, loop):
    async def aborted():
        outputs = []
        params = SamplingParams(max_tokens=2000, ignore_eos=True, n=2, temperature=1)
        async for output in llm.generate("ab", params, "aborted"):
            outputs.append(output)
            await llm.abort("aborted")
        return outputs

    *_, last = loop.run(aborted())
    assert last.finished and {o.finish_reason for o in last.outputs} == {"abort"}
    loop.run(llm.abort("unknown"))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "the prompt is empty"),
        (7, GREEDY, "a prompt is text or"),
        ({"prompt_token_ids": [600]}, GREEDY, "token ids are from 0 to 511"),
        ("ab" * 3000, GREEDY, "the prompt has 6000 tokens"),
        ("ab" * 30_000, GREEDY, "the prompt has 60000 tokens"),
        ("ab", SamplingParams(stop_token_ids=(900,)), "stop_token_ids"),
    ],
)
def test_bad_requests_are_input_errors(llm, loop, prompt, params, message):
    with pytest.raises(InputError, match=message):
        loop.run(collect(llm, prompt, params, "bad"))


def test_two_requests_of_one_name_are_an_error(llm, loop):
    async def twice():
        first = llm.generate("ab", GREEDY, "same")
        await anext(first)
        try:
            await collect(llm, "ab", GREEDY, "same")
        finally:
            await first.aclose()

    with pytest.raises(InputError, match="request_id='same'"):
        loop.run(twice())


def test_health_tokenizer_and_model(llm, loop):
    loop.run(llm.check_health())
    assert llm.is_running and not llm.errored and not llm.is_stopped
    assert loop.run(llm.get_tokenizer()).encode("ab") == [67, 68]
    assert loop.run(llm.get_model()).config.vocab_size == 512
    assert loop.run(llm.ready()).device_name == "cpu"


def test_a_dead_engine_fails_requests_now_and_later(golden):
    async def die():
        llm = AsyncLLM(str(golden / "llama_bias"), **OPTIONS)
        try:
            stream = llm.generate("ab", SamplingParams(max_tokens=2000, ignore_eos=True), "a")
            await anext(stream)
            os.kill(llm._process.process.pid, signal.SIGKILL)
            for work in (anext(stream), collect(llm, "ab", GREEDY, "b"), llm.check_health()):
                with pytest.raises(EngineDeadError, match="status -9"):
                    while True:
                        await work
            assert llm.errored and not llm.is_running
            assert await llm.wait_dead() is llm.dead_error
        finally:
            llm.shutdown()

    asyncio.run(die())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"model": "none-such"}, "none-such"), ({"max_model_len": 9999}, "max_model_len=9999")],
)
def test_an_engine_that_cannot_start_says_why(golden, options, message):
    async def start():
        async with AsyncLLM(**{"model": str(golden / "llama_bias"), **OPTIONS, **options}):
            pass

    with pytest.raises(InputError, match=message):
        asyncio.run(start())


def test_options_are_checked_before_anything_starts():
    with pytest.raises(TypeError, match="colour"):
        AsyncLLM("m", colour="red")
    with pytest.raises(InputError, match="block_size=12"):
        AsyncLLM("m", block_size=12)
