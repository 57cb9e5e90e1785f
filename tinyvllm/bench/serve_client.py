"""The client of `tinyvllm bench serve`: many streams in one process, on the standard library alone.

It reads a job as JSON from its argument and prints what it measured as JSON:
python -m tinyvllm.bench.serve_client '{"port": 8000, "clients": 32, "requests": 1, ...}'
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import sys
import time
import urllib.request
from dataclasses import dataclass

_EVENT = b"data: {"
_STEPS = re.compile(r"^tinyvllm:engine_step(s|_seconds)_total{.*} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """What to do: so many clients at once, each with so many requests one after another."""

    port: int
    clients: int
    requests: int
    prompt_len: int
    max_tokens: int
    vocab_size: int
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What a job measured, in seconds; events and tokens while all clients were streaming."""

    first_tokens: list[float]
    events_per_s: float
    tokens_per_s: float
    step_s: float | None  # the engine's, while all clients were streaming


class _Stream(asyncio.Protocol):
    """One connection: sends a request, counts events, remembers when the first one came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.events = 0
        self.first: float | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.start = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first is None and _EVENT in data:
            self.first = time.perf_counter()
        # What may be the beginning of a mark waits for the next piece.
        data = self._tail + data
        self.events += data.count(_EVENT)
        self._tail = data[-len(_EVENT) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def measure(job: Job) -> Result:
    """Does a job."""
    return asyncio.run(_measure(job))


async def _measure(job: Job) -> Result:
    rng = random.Random(job.seed)
    first_tokens: list[float] = []
    current: list[_Stream | None] = [None] * job.clients

    async def client(index: int) -> None:
        for _ in range(job.requests):
            stream = current[index] = await _open(job, rng)
            await stream.done
            assert stream.first is not None, "a request got no tokens"
            first_tokens.append(stream.first - stream.start)

    tasks = [asyncio.create_task(client(i)) for i in range(job.clients)]
    running = asyncio.gather(*tasks)
    rates: tuple[float, float, float | None] = (0.0, 0.0, None)
    if job.requests == 1:
        rates = await _watch(job, current)
    await running
    return Result(first_tokens, *rates)


async def _watch(job: Job, current: list[_Stream | None]) -> tuple[float, float, float | None]:
    """Events and tokens a second, and the engine's step time, over the middle of the streams."""
    while not all(stream is not None and stream.first is not None for stream in current):
        await asyncio.sleep(0.005)
    streams = [stream for stream in current if stream is not None]
    before, begin = await asyncio.to_thread(_engine, job.port), time.perf_counter()
    events = sum(stream.events for stream in streams)
    while not any(stream.done.done() for stream in streams):
        # Shortly before the end; an event may hold several tokens, so that the clock decides too.
        after, end = await asyncio.to_thread(_engine, job.port), time.perf_counter()
        seen = sum(stream.events for stream in streams)
        await asyncio.sleep(0.2)
    steps, seconds = after[0] - before[0], after[1] - before[1]
    return (
        (seen - events) / (end - begin),
        steps * job.clients / (end - begin),
        seconds / steps if steps else None,
    )


def _engine(port: int) -> tuple[float, float]:
    """Steps that the engine has made, and their seconds."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        found = dict(_STEPS.findall(response.read().decode()))
    return float(found["s"]), float(found["_seconds"])


async def _open(job: Job, rng: random.Random) -> _Stream:
    prompt = [rng.randrange(job.vocab_size) for _ in range(job.prompt_len)]
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    request = head.encode() + body
    _, stream = await loop.create_connection(lambda: _Stream(request), "127.0.0.1", job.port)
    return stream


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(Job(**json.loads(sys.argv[1]))))))
