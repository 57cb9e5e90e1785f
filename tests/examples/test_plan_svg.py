import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*argv):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "plan_svg.py", *map(str, argv)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_picture_is_drawn(tmp_path):
    result = run(tmp_path / "plan.svg")
    assert result.returncode == 0, result.stderr
    assert "prefill.plain, 8192 tokens, arena" in result.stdout
    assert "the memory of layer0.x then serves post_attention_layernorm" in result.stdout
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_another_model_and_program(golden, tmp_path):
    result = run(tmp_path / "x.svg", "--model", golden / "llama_bias", "--program", "decode.filter")
    assert result.returncode == 0, result.stderr
    assert "decode.filter, 512 rows" in (tmp_path / "x.svg").read_text()


def test_a_decode_step_has_a_token_for_each_row(tmp_path):
    result = run(tmp_path / "decode.svg", "--program", "decode.plain")
    assert result.returncode == 0, result.stderr
    drawn = (tmp_path / "decode.svg").read_text()
    assert drawn == (ROOT / "docs" / "plan-decode.svg").read_text()
