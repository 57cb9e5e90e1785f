"""What a caller's process and its engine's process say to each other: pickles, length first.

Both ends are ours and joined by a socket pair that nobody else can reach, so pickles are safe.
The caller sends the engine's options, then lists of `Command`. The engine answers with `Found`,
then `Ready` or `Failed`, then one `News` a step. Either end leaves by closing its socket.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from tinyvllm.outputs import TokenLogprobs
from tinyvllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # loaded before the engine's process is started, which should not wait
    import asyncio

    from tinyvllm.engine.view import EngineView

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 18


class Add(NamedTuple):
    """A request begins. `number` is its short name in `News`."""

    number: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    stream: bool


class Abort(NamedTuple):
    """A request ends; what there is of it comes as its last rows, unless it has just finished."""

    number: int


class AskStats(NamedTuple):
    """The next `News`, which comes at the end of the step under way, shall have `stats`."""


class AskView(NamedTuple):
    """It shall have `stats` and `view`."""


class Found(NamedTuple):
    """The model's files are on this machine: what to call `resolve_model` with for them."""

    model: str
    revision: str | None


class Ready(NamedTuple):
    """The model is loaded."""

    max_model_len: int
    device_name: str
    where: str  # the model, for people
    num_gpu_blocks: int


class Failed(NamedTuple):
    """The engine did not start, or has come to its end: why. `by_input`: a person can mend it."""

    message: str
    by_input: bool


# What is new of one sequence: number of the request, index of the sequence, token ids, text,
# cumulative log-probability, log-probabilities, finish reason, stop reason. A plain tuple, since
# there is one for each sequence and step.
Row = tuple[
    int,
    int,
    list[int],
    str,
    "float | None",
    "list[TokenLogprobs] | None",
    "str | None",
    "int | str | None",
]


class Head(NamedTuple):
    """Comes with a request's first rows: tokens out of the prefix cache, scores of the prompt,
    and how long it waited for its first step."""

    number: int
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    queue_seconds: float | None = None


Command = Add | Abort | AskStats | AskView


class News(NamedTuple):
    """What one step brought, for all requests.

    refused: requests that were not begun, and why. stats: the engine's numbers (see
    `engine_loop.snapshot`), for `AskStats` and `AskView`; view: for the latter.
    """

    heads: list[Head]
    rows: list[Row]
    refused: list[tuple[int, str]]
    stats: dict[str, float] | None
    view: EngineView | None


def frame(message: object) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message; IncompleteReadError or ConnectionError where the other end has left."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


class Channel:
    """The engine's end. Sending never waits: what the socket does not take is kept for later."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: object) -> None:
        """Sends a message, now or with later calls. Raises BrokenPipeError if the caller left."""
        self._outgoing += frame(message)
        self._write()

    def flush(self) -> None:
        """Waits until all is sent. Raises BrokenPipeError if the caller left."""
        while self._outgoing:
            select.select([], [self._socket], [])
            self._write()

    def receive(self, *, wait: bool) -> list[Any]:
        """The messages that have come, with `wait` at least one. EOFError if the caller left."""
        while True:
            events = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
            self._poll.modify(self._socket, events)
            for _, event in self._poll.poll(None if wait else 0):
                if event & select.POLLOUT:
                    self._write()
                if event & ~select.POLLOUT:
                    self._read()
            messages = self._complete()
            if messages or not wait:
                return messages

    def _write(self) -> None:
        if self._outgoing:
            # When the caller is behind the rest goes out with the next message.
            with contextlib.suppress(BlockingIOError):
                del self._outgoing[: self._socket.send(self._outgoing)]

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the caller has gone")
        self._incoming += data

    def _complete(self) -> list[Any]:
        """Takes whole messages out of what was read."""
        messages, start = [], 0
        while len(self._incoming) >= start + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._incoming, start)
            end = start + _LENGTH.size + size
            if len(self._incoming) < end:
                break
            messages.append(pickle.loads(self._incoming[start + _LENGTH.size : end]))
            start = end
        del self._incoming[:start]
        return messages
