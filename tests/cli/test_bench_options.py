"""What the options of the benchmarks take."""

import pytest

from tinyvllm.cli import bench_options
from tinyvllm.cli.main import main


@pytest.mark.parametrize("value", ["abc", "8", "8x", "x8", "-1x8", "1x2x3"])
def test_a_pair_is_two_numbers(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "prefill", f"--prompts={value}"])
    assert f"{value!r}: must be two numbers, as in 32x1024" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["startup", "load", "serve", "sweep", "preemption"])
def test_nothing_takes_hours_on_a_cpu_that_nobody_asked_for(what, capsys, monkeypatch):
    monkeypatch.setattr(bench_options, "cuda_unavailable", lambda: "there is none.")
    assert main(["bench", what]) == 1
    assert "no GPU: there is none. On the CPU with --device cpu" in capsys.readouterr().err
