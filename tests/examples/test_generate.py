import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def generate(*argv):
    command = [sys.executable, "examples/generate.py", *map(str, argv), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def model(golden):
    return golden / "llama_bias"


def test_the_text_and_the_rates_are_written(model):
    from tinyvllm import LLM, SamplingParams

    result = generate("ab", "--model", model, "--max-tokens", 12)
    assert result.returncode == 0, result.stderr
    with LLM(str(model), device="cpu", max_num_batched_tokens=512) as llm:
        (output,) = llm.generate("ab", SamplingParams(temperature=0, max_tokens=12))
    assert result.stdout == output.outputs[0].text
    assert f"llama_bias from {model}" in result.stderr and "on cpu" in result.stderr
    for word in ("prompt", "decode", "tokens/s", "first token"):
        assert word in result.stderr


def test_temperature_samples(model):
    texts = {
        generate("ab", "--model", model, "--max-tokens", 12, "--temperature", t).stdout
        for t in (0, 5)
    }
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["", "--max-tokens", 4], "the prompt is empty"),
        (["ab", "--temperature", -1], "temperature=-1"),
        (["ab", "--max-tokens", 0], "max_tokens=0"),
    ],
)
def test_bad_input_is_one_line(model, argv, message):
    result = generate(*argv, "--model", model)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_there_is_named(tmp_path):
    result = generate("ab", "--model", tmp_path / "none")
    assert result.returncode == 1 and "none" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_damaged_model_is_named(model, tmp_path):
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["Bert"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = generate("ab", "--model", tmp_path)
    assert result.returncode == 1
    assert "architectures" in result.stderr.splitlines()[-1]
