"""`tinyvllm bench startup`: from the start of a process to its first token, part by part."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from tinyvllm.bench.command import options_of
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.util import START_PREFIX

FIRST_STEP = "first step, with the kernels that it waits for"
Parts = dict[str, float]  # seconds by part, in order


def bench_startup(config: EngineConfig, runs: int) -> None:
    """Seconds from the start of a process to its first token, with the kernel cache empty and warm.

    Python's byte code is at hand in all of them, as `pip install` leaves it.
    """
    check_int("runs", runs, 1, None)
    command = [
        sys.executable,
        "-m",
        "tinyvllm",
        "--verbose",
        "generate",
        "Hello",
        # As users start it: it waits for no kernel but those of its first steps.
        *options_of(replace(config, wait_for_kernels=False)),
        "--max-tokens",
        "2",
        "--ignore-eos",
    ]
    with tempfile.TemporaryDirectory() as directory:

        def run(cache: str, *options: str) -> Parts:
            return start_parts([*command, *options], _environment(Path(directory), cache))

        run("other")  # for the byte code alone
        empty = run("cache")
        print(f"empty kernel cache: first token after {sum(empty.values()):.2f} s", flush=True)
        run("cache", "--wait-for-kernels")  # the one before has left out what it did not need
        warm = []
        for _ in range(runs):
            warm.append(run("cache"))
            seconds = sum(warm[-1].values())
            print(f"warm kernel cache: first token after {seconds:.2f} s", flush=True)
    print(_table(empty, warm))


def _environment(directory: Path, cache: str) -> dict[str, str]:
    """What caches are kept in, the byte code in a place that Python may write to."""
    environment = {
        **os.environ,
        "TINYVLLM_CACHE_DIR": str(directory / cache),
        "PYTHONPYCACHEPREFIX": str(directory / "bytecode"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def start_parts(command: list[str], environment: dict[str, str]) -> Parts:
    """Seconds of each part of a start, until the process prints something; waits for its end.

    The parts are those that its log names, in the order in which they end.
    """
    ends: list[tuple[str, float]] = []
    log: list[str] = []

    def read(lines: IO[bytes]) -> None:
        for line in lines:
            log.append(line.decode(errors="replace"))
            if log[-1].startswith(START_PREFIX):
                ends.append((log[-1].removeprefix(START_PREFIX).strip(), time.perf_counter()))

    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        reader = threading.Thread(target=read, args=(process.stderr,))
        reader.start()
        first = process.stdout.read(1)
        shown = time.perf_counter()
        process.stdout.read()
        reader.join()
    if not first:
        raise RuntimeError("".join(log))
    parts: Parts = {}
    for name, end in [*(part for part in ends if part[1] < shown), (FIRST_STEP, shown)]:
        parts[name] = parts.get(name, 0.0) + end - start
        start = end
    return parts


def _table(empty: Parts, warm: list[Parts]) -> str:
    """Milliseconds by part: with an empty cache, and the medians with a warm one."""
    lines = [f"{'ms by part':64} {'empty':>7} {'warm':>7}"]
    for name in empty:
        median = statistics.median(parts.get(name, 0.0) for parts in warm)
        lines.append(f"{name:64} {1e3 * empty[name]:7.0f} {1e3 * median:7.0f}")
    total = statistics.median(sum(parts.values()) for parts in warm)
    lines.append(f"{'first token':64} {1e3 * sum(empty.values()):7.0f} {1e3 * total:7.0f}")
    return "\n".join(lines)
