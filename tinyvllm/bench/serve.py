"""`tinyvllm bench serve`: what serving costs the engine, and what clients get, on one machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tinyvllm.api.llm import LLM
from tinyvllm.bench.command import options_of
from tinyvllm.bench.serve_client import Job, Result
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

_START_S = 600.0  # for a server to answer


@dataclass(frozen=True)
class ServeLoad:
    """Streams at once and their lengths, and the requests for times to first token."""

    clients: list[int]
    prompt_len: int
    max_tokens: int
    first_token_clients: list[int]
    first_token_requests: int  # one after another, of each client


def bench_serve(config: EngineConfig, load: ServeLoad, starts: int, *, as_json: bool) -> None:
    """Prints, or as one JSON object: step times with and without clients, events and tokens a
    second, times to first token, and the time from the start of the server to its first token.

    InputError for numbers that are not positive, and for more streams than the engine runs at once.
    """
    _check(config, load, starts)
    longest = load.prompt_len + load.max_tokens
    config = dataclasses.replace(config, max_model_len=config.max_model_len or longest)
    alone, vocab_size = _alone(config, load)
    # As users start it: it waits for no kernel but those of its first step. All are in the cache.
    config = dataclasses.replace(config, wait_for_kernels=False)
    seconds = []
    for start in range(starts):
        with _server(config) as (port, begin):
            _first_token(port, vocab_size)
            seconds.append(time.perf_counter() - begin)
            _say(as_json, f"server start to first token: {seconds[-1]:.2f} s")
            if start < starts - 1:
                continue
            steps = [_steps(port, load, n, vocab_size, alone[n], as_json) for n in load.clients]
            firsts = [_firsts(port, load, n, vocab_size, as_json) for n in load.first_token_clients]
    if as_json:
        print(json.dumps({"starts_s": seconds, "steps": steps, "first_tokens": firsts}))


def _check(config: EngineConfig, load: ServeLoad, starts: int) -> None:
    for clients in load.clients:
        check_int("clients", clients, 1, config.max_num_seqs)
    for clients in load.first_token_clients:
        check_int("first_token_clients", clients, 1, None)
    check_int("prompt_len", load.prompt_len, 1, 1 << 20)
    check_int("output_len", load.max_tokens, 1, 1 << 20)
    check_int("first_token_requests", load.first_token_requests, 1, None)
    check_int("starts", starts, 1, None)


def _say(as_json: bool, text: str) -> None:
    if not as_json:
        print(text, flush=True)


def _alone(config: EngineConfig, load: ServeLoad) -> tuple[dict[int, float], int]:
    """Seconds of a step without any server, by the number of sequences."""
    with LLM(**dataclasses.asdict(config)) as llm:
        vocab_size = llm.engine.model.config.vocab_size
        _step_seconds(llm.engine, 1, 8, 8)  # whatever is done at first use
        times = {
            n: _step_seconds(llm.engine, n, load.prompt_len, load.max_tokens) for n in load.clients
        }
    return times, vocab_size


def _step_seconds(engine: LLMEngine, batch: int, prompt_len: int, max_tokens: int) -> float:
    """Mean seconds of a step from when all decode until the first one ends."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(batch):
        ids = rng.integers(0, engine.model.config.vocab_size, prompt_len).tolist()
        engine.add_request(f"{batch}.{i}", {"prompt_token_ids": ids}, params)
    running, count, begin, end = engine.scheduler.running, 0, 0.0, 0.0
    while engine.has_unfinished_requests():
        engine.step()
        if len(running) == batch and all(request.decoding for request in running):
            end = time.perf_counter()
            begin = begin or end
            count += 1
    return (end - begin) / max(1, count - 1)


@contextlib.contextmanager
def _server(config: EngineConfig) -> Iterator[tuple[int, float]]:
    """A server's port, and when its process was started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tinyvllm", "serve", "--port", str(port), *options_of(config)]
    begin = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not _listens(port):
                if process.poll() is not None or time.perf_counter() - begin > _START_S:
                    assert process.stderr is not None
                    raise InputError(f"the server did not start: {process.stderr.read()}")
                time.sleep(0.005)
            yield port, begin
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _client(job: Job) -> Result:
    """Does a job in a process of its own, so that it takes no time from anybody else."""
    command = [sys.executable, "-m", "tinyvllm.bench.serve_client"]
    text = json.dumps(dataclasses.asdict(job))
    done = subprocess.run([*command, text], stdout=subprocess.PIPE, check=True)
    return Result(**json.loads(done.stdout))


def _first_token(port: int, vocab_size: int) -> None:
    """Waits for the first token of a request, in this process: another would take time to start."""
    body = json.dumps({"prompt": [vocab_size // 2] * 8, "max_tokens": 2, "stream": True})
    request = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=_START_S) as sock:
        sock.sendall(request.encode())
        data = b""
        while b"data: {" not in data:
            piece = sock.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"no token came: {data!r}")
            data += piece


def _steps(
    port: int, load: ServeLoad, clients: int, vocab_size: int, alone_s: float, as_json: bool
) -> dict[str, float | int | None]:
    job = Job(port, clients, 1, load.prompt_len, load.max_tokens, vocab_size, seed=clients)
    result = _client(job)
    ratio = None if result.step_s is None else result.step_s / alone_s
    shown = "?" if result.step_s is None else f"{result.step_s * 1e3:.3f} ms ({ratio:.3f} x)"
    _say(
        as_json,
        f"{clients:>4} clients: step {alone_s * 1e3:.3f} ms alone, {shown} with them; "
        f"{result.events_per_s:.0f} events/s, {result.tokens_per_s:.0f} tokens/s; "
        f"first token median {statistics.median(result.first_tokens) * 1e3:.1f} ms",
    )
    return {
        "clients": clients,
        "step_alone_ms": alone_s * 1e3,
        "step_ms": None if result.step_s is None else result.step_s * 1e3,
        "ratio": ratio,
        "events_per_s": result.events_per_s,
        "tokens_per_s": result.tokens_per_s,
    }


def _firsts(
    port: int, load: ServeLoad, clients: int, vocab_size: int, as_json: bool
) -> dict[str, float | int]:
    requests = load.first_token_requests * (8 if clients == 1 else 1)
    job = Job(port, clients, requests, load.prompt_len, 32, vocab_size, seed=1000 + clients)
    times = sorted(_client(job).first_tokens)
    p50, p99 = (float(np.percentile(times, p)) * 1e3 for p in (50, 99))
    _say(
        as_json,
        f"{clients:>4} clients, {len(times)} requests of {load.prompt_len} + 32 tokens: "
        f"first token after {p50:.1f} ms (p50), {p99:.1f} ms (p99)",
    )
    return {"clients": clients, "requests": len(times), "p50_ms": p50, "p99_ms": p99}
