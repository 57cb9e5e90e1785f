"""Callers that go away: their requests end, nothing of them is left, nobody else is hurt."""

import asyncio
import json
import random
from pathlib import Path

import httpx

TOKENS = 24
BODY = {"prompt": "ab", "max_tokens": TOKENS, "temperature": 0.9, "ignore_eos": True}


async def stream(client, url, number, leaves_after):
    """One stream; returns its completion tokens, or None if it left before the end."""
    body = BODY | {"seed": number, "stream": True, "stream_options": {"include_usage": True}}
    count = 0
    async with client.stream("POST", url + "/v1/completions", json=body) as response:
        assert response.status_code == 200
        usage, last = None, None
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            last = line[6:]
            count += 1
            if leaves_after is not None and count >= leaves_after:
                return None
            if last != "[DONE]":
                usage = json.loads(last)["usage"] or usage
        assert last == "[DONE]"
        return usage["completion_tokens"]


async def crowd(url, size):
    rng = random.Random(size)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        leaving = [rng.choice([None, 1, 5, 10]) for _ in range(size)]
        results = await asyncio.gather(
            *[stream(client, url, i, after) for i, after in enumerate(leaving)]
        )
    stayed = [result for result, after in zip(results, leaving, strict=True) if after is None]
    assert stayed == [TOKENS] * len(stayed) and 0 < len(stayed) < size


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_two_hundred_streams_with_random_disconnects(server):
    """Whoever stays gets everything; afterwards all blocks are free (the fixture looks)."""
    asyncio.run(crowd(server.url, 200))
    pids = [server.process.pid, server.engine_pid()]
    before = [resident_bytes(pid) for pid in pids]
    asyncio.run(crowd(server.url, 200))
    after = [resident_bytes(pid) for pid in pids]
    for a, b in zip(before, after, strict=True):
        assert b - a < 16 << 20, f"grew by {(b - a) >> 20} MiB"


def test_a_caller_who_leaves_ends_the_request(server):
    """Streamed or not, before the first token or after: it runs no more, long before its end."""

    async def leave(body, seconds):
        async with httpx.AsyncClient(timeout=60) as client:
            try:
                answer = client.post(server.url + "/v1/completions", json=body)
                await asyncio.wait_for(answer, seconds)
            except asyncio.TimeoutError:
                return
        raise AssertionError("it ended by itself")

    aborted = server_aborts(server)
    for streams in (False, True):
        body = BODY | {"max_tokens": 2000, "stream": streams}
        asyncio.run(leave(body, 0.3))
        chat = BODY | {"prompt": ["ab", "cd"], "max_tokens": 2000, "stream": streams}
        asyncio.run(leave(chat, 0.3))
    for _ in range(100):
        if server.metric("vllm:num_requests_running") == 0:
            break
    assert server_aborts(server) == aborted + 6


def server_aborts(server):
    text = server.request("/metrics")[2].decode()
    (line,) = [x for x in text.splitlines() if "request_success" in x and '"abort"' in x]
    return float(line.split()[-1])
