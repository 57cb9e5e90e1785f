"""`tinyvllm trace -- generate ...`."""

import json

import pytest

from tinyvllm.cli.main import main


def trace(golden, *options, command="generate"):
    inner = [command, "ab", "--model", str(golden / "llama_bias"), "--device", "cpu"]
    sizes = ["--max-tokens", "2", "--max-num-batched-tokens", "512"]
    return main(["trace", *options, "--", *inner, *sizes])


def test_the_command_runs_and_its_trace_is_written(golden, tmp_path, capsys):
    path = tmp_path / "calls"
    assert trace(golden, "-o", str(path)) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and f"trace: {path}" in err
    text = path.read_text()
    assert "no CUDA calls" in text and "run prefill.plain(T=2, " in text and "matmul(" in text


@pytest.mark.parametrize(("format", "name"), [("perfetto", "trace.json"), ("jsonl", "trace.jsonl")])
def test_formats_and_default_files(golden, tmp_path, monkeypatch, format, name):
    monkeypatch.chdir(tmp_path)
    assert trace(golden, "--format", format) == 0
    text = (tmp_path / name).read_text()
    assert json.loads(text if format == "perfetto" else text.splitlines()[0])


def test_the_suffix_decides(golden, tmp_path):
    assert trace(golden, "-o", str(tmp_path / "x.json")) == 0
    assert len(json.loads((tmp_path / "x.json").read_text())) > 10


@pytest.mark.parametrize("argv", [["--"], ["--", "bench"], ["--format", "pdf", "--", "generate"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(["trace", *argv])
    assert error.value.code == 2
    assert "usage: tinyvllm trace" in capsys.readouterr().err


def test_bad_input_is_one_line(golden, tmp_path, capsys):
    assert trace(golden, "-o", str(tmp_path / "none" / "x")) == 1
    assert "No such file" in capsys.readouterr().err
