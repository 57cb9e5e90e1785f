"""What the options of the benchmarks take."""

import pytest

from tinyvllm.cli.main import main


@pytest.mark.parametrize("value", ["abc", "8", "8x", "x8", "-1x8", "1x2x3"])
def test_a_pair_is_two_numbers(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "prefill", f"--prompts={value}"])
    assert f"{value!r}: must be two numbers, as in 32x1024" in capsys.readouterr().err
