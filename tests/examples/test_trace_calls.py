import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ops_are_counted_on_the_cpu(golden):
    result = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "trace_calls.py",
            *("--model", golden / "llama_bias", "--device", "cpu", "--max-model-len", "128"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "no CUDA calls" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["prefill", "1", "x", "sample"] in [line[:4] for line in lines]
    assert ["decode", "3", "x", "sample"] in [line[:4] for line in lines]
