"""Runs an example as a person would."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_example(name, *argv, stdin=""):
    """The finished process; standard output and error as text."""
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", *map(str, argv)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )
