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


@pytest.mark.parametrize(
    "bench",
    [
        ["latency"],
        ["kernels"],
        ["kernels", "--phase=prefill"],
        ["attention"],
        ["attention", "--phase=prefill"],
        ["memory"],
    ],
)
@pytest.mark.parametrize(
    ("option", "limit"), [("batch", "from 1 to 4096"), ("context", "from 1 to 1048576")]
)
def test_steps_without_rows_or_tokens_are_refused(bench, option, limit, capsys):
    for value in ("0", "-5", "2000000"):
        assert main(["bench", *bench, f"--{option}={value}"]) == 1
        assert f"{option}={value}: must be {limit}" in capsys.readouterr().err


def test_a_block_size_that_does_not_exist_is_refused_at_once(capsys):
    assert main(["bench", "memory", "--block-sizes", "16", "12"]) == 1
    assert "block_size=12: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ("clients", "from 1 to 512"),
        ("first-token-clients", "at least 1"),
        ("prompt-len", "from 1 to 1048576"),
        ("output-len", "from 1 to 1048576"),
        ("first-token-requests", "at least 1"),
        ("starts", "at least 1"),
    ],
)
def test_numbers_of_a_server_s_load_are_positive(option, limit, capsys):
    assert main(["bench", "serve", "--device=cpu", f"--{option}=0"]) == 1
    assert f"{option.replace('-', '_')}=0: must be {limit}" in capsys.readouterr().err
