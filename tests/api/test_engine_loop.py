"""The engine's side of the channel: commands in, one message a step out."""

import socket
import threading

import pytest

from tinyvllm.api.engine_loop import EngineLoop
from tinyvllm.api.wire import Abort, Add, AskStats, AskView, Channel
from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)


class Caller:
    """Our end of the channel."""

    def __init__(self, sock):
        self._socket = sock
        self._channel = Channel(sock)

    def send(self, *commands):
        self._channel.send(list(commands))

    def news(self):
        return self._channel.receive(wait=True)

    def until(self, number):
        """All messages up to the one in which a request ends."""
        messages = []
        while not any(row[0] == number and row[6] for m in messages for row in m.rows):
            messages += self.news()
        return messages


@pytest.fixture
def caller(golden):
    config = EngineConfig(
        model=str(golden / "llama_bias"), device="cpu", max_num_seqs=4, max_num_batched_tokens=512
    )
    engine = LLMEngine(config)
    ours, theirs = socket.socketpair()
    ended = []

    def run():
        try:
            EngineLoop(engine, Channel(theirs)).run()
        except EOFError:
            ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield Caller(ours)
    ours.close()
    thread.join(timeout=30)
    assert ended == [True]
    engine.abort_all()
    assert engine.scheduler.blocks.num_used == 0
    engine.close()
    theirs.close()


def test_a_step_is_one_message_for_all_its_rows(caller):
    caller.send(*[Add(n, f"r{n}", [5, 6, 7 + n], GREEDY, 0, True) for n in range(3)])
    messages = caller.until(2)
    assert [sorted(row[0] for row in m.rows) for m in messages] == [[0, 1, 2]] * 3
    assert [len(m.heads) for m in messages] == [3, 0, 0]
    assert all(head.queue_seconds >= 0 for head in messages[0].heads)
    assert all(m.stats is None and m.refused == [] for m in messages)


def test_without_stream_there_is_one_message_at_the_end(caller):
    caller.send(Add(0, "r", [5, 6], GREEDY, 0, False))
    (message,) = caller.until(0)
    ((number, index, token_ids, text, *_, finish_reason, _),) = message.rows
    assert (number, index, len(token_ids), text, finish_reason) == (0, 0, 3, "", "length")


def test_what_cannot_run_is_refused_and_the_rest_runs(caller):
    caller.send(Add(0, "bad", [], GREEDY, 0, True), Add(1, "good", [5], GREEDY, 0, True))
    messages = caller.until(1)
    ((number, reason),) = [refusal for m in messages for refusal in m.refused]
    assert number == 0 and "the prompt is empty" in reason
    caller.send(Abort(0), Abort(77))  # unknown by now, which is no error


def test_an_abort_ends_a_request_with_its_last_rows(caller):
    caller.send(Add(0, "r", [5, 6], LONG, 0, True))
    caller.news()
    caller.send(Abort(0))
    last = caller.until(0)[-1]
    assert last.rows[-1][6] == "abort"
    caller.send(Add(1, "r", [5, 6], GREEDY, 0, True))  # the name is free again
    caller.until(1)


def test_numbers_come_when_asked_for(caller):
    caller.send(AskStats())
    (idle,) = caller.news()
    assert idle.stats["num_requests_running"] == 0 and idle.stats["kv_blocks_used"] == 0
    caller.send(Add(0, "r", [5, 6], LONG, 0, True))
    caller.news()
    caller.send(AskStats())
    messages = []
    while not any(m.stats for m in messages):
        messages += caller.news()
    (stats,) = [m.stats for m in messages if m.stats]
    assert stats["num_requests_running"] == 1 and stats["kv_blocks_used"] > 0
    assert stats["loop_steps"] > 0 and stats["loop_seconds"] > 0
    caller.send(Abort(0))
    caller.until(0)


def test_a_view_comes_with_the_numbers_of_its_moment_and_only_when_asked_for(caller):
    caller.send(AskView(), AskStats())
    (idle,) = caller.news()
    assert idle.view.requests == [] and set(idle.view.cells) == {0} and idle.stats
    caller.send(Add(0, "r", [5, 6], LONG, 0, True))
    messages = caller.news()
    caller.send(AskView())
    while not any(m.view for m in messages):
        messages += caller.news()
    (message,) = [m for m in messages if m.view or m.stats]
    (request,) = message.view.requests
    assert request.request_id == "r" and request.blocks == message.stats["kv_blocks_used"]
    caller.send(AskStats())
    while not any(m.stats for m in messages[messages.index(message) + 1 :]):
        messages += caller.news()
    assert [m for m in messages if m.view] == [message]
    last = messages[-1].stats
    assert last["views"] == 2 and 0 < last["view_seconds"] < 1
    caller.send(Abort(0))
    caller.until(0)
