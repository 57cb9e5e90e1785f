"""Messages between two processes, however the socket cuts them."""

import socket

import pytest

from tinyvllm.api.wire import Abort, Channel, frame


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Channel(theirs)


def test_messages_come_whole_however_they_are_cut(ends):
    ours, channel = ends
    data = frame(Abort(1)) + frame(["two"]) + frame({"three": 3})
    assert channel.receive(wait=False) == []
    found = []
    for i in range(0, len(data), 7):
        ours.sendall(data[i : i + 7])
        found += channel.receive(wait=False)
    assert found == [Abort(1), ["two"], {"three": 3}]
    ours.sendall(data)
    assert channel.receive(wait=True) == found


def test_a_reader_that_is_behind_does_not_hold_up_the_sender(ends):
    ours, channel = ends
    messages = [bytes([i]) * 100_000 for i in range(50)]
    for message in messages:
        channel.send(message)  # far more than the socket holds
    other = Channel(ours)
    found = []
    while len(found) < len(messages):
        channel.receive(wait=False)  # what is left goes out beside other work
        found += other.receive(wait=False)
    assert found == messages


def test_the_other_sides_end_is_noticed(ends):
    ours, channel = ends
    ours.sendall(frame("last"))
    ours.close()
    assert channel.receive(wait=True) == ["last"]
    with pytest.raises(EOFError):
        channel.receive(wait=True)
    with pytest.raises(BrokenPipeError):
        channel.send("nobody reads this")
