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
        for run in range(runs + 1):
            start = time.perf_counter()
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "TINYVLLM_CACHE_DIR": cache},
            ) as process:
                assert process.stdout is not None and process.stderr is not None
                first = process.stdout.read(1)
                seconds = time.perf_counter() - start
                if not first:
                    raise RuntimeError(process.stderr.read().decode())
            state = "empty" if run == 0 else "warm"
            print(f"{state} kernel cache: first token after {seconds:.2f} s", flush=True)
