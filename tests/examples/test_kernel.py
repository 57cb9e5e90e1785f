import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kernel.py"


def test_example_runs_or_says_why_not():
    result = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "values are right" in result.stdout or "Compiled saxpy<256> for sm_90" in result.stdout


def test_example_stays_short():
    assert len(EXAMPLE.read_text().splitlines()) < 40
