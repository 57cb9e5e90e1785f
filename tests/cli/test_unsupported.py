"""Options of vLLM that are not here are refused by name."""

import pytest

from tinyvllm.cli.main import main
from tinyvllm.cli.unsupported import UNSUPPORTED


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_option_is_refused_by_name(name, capsys):
    option = "--" + name.replace("_", "-")
    for argv in (["generate", "x", option], ["serve", "m", option, "7"]):
        with pytest.raises(SystemExit) as error:
            main(argv)
        assert error.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"{option}" in last and "is not supported: " in last


def test_values_that_ask_for_nothing_are_let_through(capsys):
    options = ["--tensor-parallel-size", "1", "--quantization", "none", "--kv-cache-dtype=auto"]
    assert main(["generate", "x", "--model", "none-such", *options]) == 1
    assert "none-such" in capsys.readouterr().err
