"""`tinyvllm plan`, without a GPU."""

import json

import pytest

from tinyvllm.cli.main import main


def test_plan_prints_what_fits_and_the_buffers(capsys):
    assert main(["plan", "llama-3.2-1b", "--max-num-seqs", "8", "--gpu-memory", "24"]) == 0
    out = capsys.readouterr().out
    assert "preset llama-3.2-1b" in out and "H200 with 24.00 GiB free (assumed" in out
    assert "KV blocks" in out and "fits: " in out and "max_num_seqs=8" in out
    assert "decode.plain, 1 row " in out and "decode.plain, 8 rows" in out
    assert "All further layers use the same offsets" in out


def test_plan_draws_and_speaks_json(tmp_path, capsys):
    svg = tmp_path / "plan.svg"
    lengths = tmp_path / "lengths"
    lengths.write_text("100,28\n")
    argv = ["plan", "llama-3.2-1b", "--json", "--svg", str(svg), "--lengths", str(lengths)]
    assert main([*argv, "--phase", "decode", "--max-num-seqs", "4"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] and values["options"]["max_num_seqs"] == 4
    assert "decode.plain, 4 rows" in svg.read_text()


def test_a_directory_with_a_config_is_enough(golden, tmp_path, capsys):
    (tmp_path / "config.json").write_text((golden / "llama_bias" / "config.json").read_text())
    assert main(["plan", str(tmp_path), "--gpu-memory", "1"]) == 0
    assert f"{tmp_path.name} from {tmp_path}/config.json" in capsys.readouterr().out


def test_what_does_not_fit_is_exit_status_1(capsys):
    assert main(["plan", "llama-3.2-1b", "--gpu-memory", "2"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "weights alone exceed" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["none"], "model='none': no such directory or GGUF file, and not a preset"),
        (["llama-3.2-1b", "--device-name", "H300"], "device_name='H300': must be one of A100"),
        (["llama-3.2-1b", "--gpu-memory", "-1"], "gpu_memory=-1"),
        (["llama-3.2-1b", "--gpu-memory", "0"], "gpu_memory=0"),
        (["llama-3.2-1b", "--gpu-memory", "nan"], "gpu_memory=nan"),
        (["llama-3.2-1b", "--max-model-len", "200000"], "max_model_len=200000"),
        (["llama-3.2-1b", "--lengths", "/none"], "lengths '/none'"),
        (["llama-3.2-1b", "--svg", "/none/x.svg"], "/none/x.svg"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    assert main(["plan", *argv]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
