import json
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm.cli.main import COMMANDS, main
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["generate"],
        ["generate", "x", "--block-size", "12"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "x", "--max-token", "5", "--colour", "red"],
        ["sing"],
    ],
)
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert "usage: tinyvllm" in err and len(err.splitlines()) == 2


@pytest.mark.parametrize("argv", [["-h"], ["-h", "generate"], ["-v", "--help", "chat"]])
def test_help_names_all_commands(argv, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(argv)
    assert set(COMMANDS) <= set(capsys.readouterr().out.split())


def generate(golden, *options):
    return main(
        [
            "generate",
            "ab",
            "--model",
            str(golden / "llama_bias"),
            "--device",
            "cpu",
            "--max-num-batched-tokens",
            "512",
            *options,
        ]
    )


def test_generate_writes_the_text_and_says_how_fast_it_was(golden, capsys):
    assert generate(golden, "--max-tokens", "8", "--ignore-eos") == 0
    out, err = capsys.readouterr()
    from tinyvllm import LLM

    with LLM(str(golden / "llama_bias"), device="cpu", max_num_batched_tokens=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert out == llm.generate("ab", params)[0].outputs[0].text + "\n"
    assert "llama_bias" in err and "on cpu" in err
    assert "tokens/s prompt" in err and "tokens/s decode" in err and "first token" in err


def test_json_is_one_object(golden, capsys):
    assert generate(golden, "--max-tokens", "8", "--ignore-eos") == 0
    text = capsys.readouterr().out
    options = ("--max-tokens", "8", "--ignore-eos", "--json")
    assert generate(golden, *options) == 0
    result = json.loads(capsys.readouterr().out)
    (output,) = result["outputs"]
    assert result["prompt"] == "ab" and result["prompt_token_ids"] == [67, 68]
    assert output["text"] + "\n" == text and len(output["token_ids"]) == 8
    assert output["finish_reason"] == "length" and output["stop_reason"] is None
    assert generate(golden, *options, "--n", "2", "--temperature", "1") == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"]) == 2


def test_one_token_has_no_decode_rate(golden, capsys):
    assert generate(golden, "--max-tokens", "1") == 0
    assert "tokens/s decode" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature=-1"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--max-model-len", "4096"], "max_model_len=4096"),
        (["--stop-token-ids", "600"], r"stop_token_ids[0]=600"),
        (["--device", "gpu"], "device='gpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_1(golden, options, message, capsys):
    assert generate(golden, *options) == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert last.startswith("tinyvllm: ") and message in last
    assert "Traceback" not in err and out == ""


def test_errors_of_ours_are_not_hidden(monkeypatch):
    def broken(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr("tinyvllm.cli.doctor.run_doctor", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])


@pytest.mark.parametrize(
    ("error", "status"),
    [(InputError("bad"), 1), (KeyboardInterrupt(), 130)],
)
def test_exit_status_of_errors(monkeypatch, error, status):
    def fails(args):
        raise error

    monkeypatch.setattr("tinyvllm.cli.doctor.run_doctor", fails)
    assert main(["doctor"]) == status


def test_a_closed_pipe_ends_quietly(golden):
    """`tinyvllm generate ... | head -c 1`, as the module and as a process."""
    command = [
        sys.executable,
        "-m",
        "tinyvllm",
        "generate",
        "ab",
        "--device",
        "cpu",
        "--model",
        str(golden / "llama_bias"),
        "--max-tokens",
        "200",
        "--ignore-eos",
        "--max-num-batched-tokens",
        "512",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert "Traceback" not in err and "Exception ignored" not in err


def test_doctor_returns_1_when_there_is_a_problem(monkeypatch):
    from tinyvllm import doctor

    for problems, status in ((0, 0), (3, 1)):
        monkeypatch.setattr(doctor, "run_doctor", lambda index, as_json, n=problems: n)
        assert main(["doctor"]) == status
