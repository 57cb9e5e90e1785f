"""`tinyvllm chat` over pipes: turns, commands, Ctrl-C, errors."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys

import pytest
from serving import ROOT, chat_model

from tinyvllm import LLM, SamplingParams
from tinyvllm.cli.main import main

OPTIONS = ["--device", "cpu", "--max-num-batched-tokens", "512"]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def model(golden, tmp_path_factory):
    return str(chat_model(golden, tmp_path_factory.mktemp("chat")))


def chat(model, monkeypatch, capsys, lines, *options):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", model, *OPTIONS, *GREEDY, *options]) == 0
    return capsys.readouterr()


def answers(model, *conversations):
    """The answer that the offline API gives to each conversation of (role, text)."""
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(model, device="cpu", max_num_batched_tokens=512) as llm:
        messages = [[{"role": r, "content": c} for r, c in talk] for talk in conversations]
        return [output.outputs[0].text for output in llm.chat(messages, params)]


def test_a_turn_sees_those_before_it_until_reset(model, monkeypatch, capsys):
    out, err = chat(model, monkeypatch, capsys, ["ab", "cd", "/reset", "cd"], "--json")
    first, second, third = [json.loads(line) for line in out.splitlines()]
    said = first["content"]
    assert first["role"] == "assistant" and first["finish_reason"] in ("stop", "length")
    talk = [("user", "ab"), ("assistant", said), ("user", "cd")]
    expected = answers(model, talk[:1], talk, talk[2:])
    assert [first["content"], second["content"], third["content"]] == expected
    assert "on cpu" in err


def test_answers_alone_are_written_and_a_system_message_stands_first(model, monkeypatch, capsys):
    out, _ = chat(model, monkeypatch, capsys, ["ab", "/exit", "cd"], "--system", "be brief")
    (expected,) = answers(model, [("system", "be brief"), ("user", "ab")])
    assert out == expected + "\n"


def test_unknown_commands_and_talks_too_long_are_told_and_it_goes_on(model, monkeypatch, capsys):
    out, err = chat(model, monkeypatch, capsys, ["/sing", "a" * 3000, "", "ab"])
    (expected,) = answers(model, [("user", "ab")])
    assert out == expected + "\n"
    assert "/sing: no such command" in err and "it may have 2047" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--n", "2"], "n=2"), (["--temperature", "-1"], "temperature=-1"), (["--model", "x"], "one")],
)
def test_bad_options_are_one_line(model, monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
    assert main(["chat", model, *OPTIONS, *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1] and "Traceback" not in err


def test_a_model_without_a_template_is_refused_before_any_talk(golden, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
    assert main(["chat", str(golden / "llama_bias"), *OPTIONS]) == 1
    assert "no chat template" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(model):
    command = [sys.executable, "-m", "tinyvllm", "chat", model, *OPTIONS, "--ignore-eos"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdin.write(b"ab\n")
        process.stdin.flush()
        os.read(process.stdout.fileno(), 1)  # the answer, of thousands of tokens, has begun
        process.send_signal(signal.SIGINT)
        first = process.stdout.readline()
        process.stdin.write(b"/exit\n")
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Traceback" not in err
    assert len(first) < 5000 and rest == b""


def test_without_jinja_no_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["chat", "no/such/model"]) == 1
    assert "pip install 'tinyvllm[chat]'" in capsys.readouterr().err
