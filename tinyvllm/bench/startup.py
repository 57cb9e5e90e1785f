"""`tinyvllm bench startup`: from the start of a process to its first token."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from tinyvllm.config import EngineConfig


def bench_startup(config: EngineConfig, runs: int) -> None:
    """Seconds from the start of a process to its first token: first with an empty kernel cache."""
    command = [
        sys.executable,
        "-m",
        "tinyvllm",
        "generate",
        "Hello",
        "--model",
        config.model,
        "--load-format",
        config.load_format,
        "--max-tokens",
        "2",
        "--ignore-eos",
    ]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TINYVLLM_CACHE_DIR": cache}
        for run in range(runs + 1):
            if run == 1:  # the first one has left kernels out that its tokens did not need
                _first_token([*command, "--wait-for-kernels"], environment)
            seconds = _first_token(command, environment)
            state = "empty" if run == 0 else "warm"
            print(f"{state} kernel cache: first token after {seconds:.2f} s", flush=True)


def _first_token(command: list[str], environment: dict[str, str]) -> float:
    """Seconds from the start of a process until it prints something; waits for its end."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        if not first:
            raise RuntimeError(process.stderr.read().decode())
    return seconds
