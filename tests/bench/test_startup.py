"""The parts of a start are told apart by the log of the process."""

import itertools
import sys

import pytest

from tinyvllm.bench import startup
from tinyvllm.bench.startup import FIRST_STEP, bench_startup, start_parts
from tinyvllm.cli.main import main
from tinyvllm.config import EngineConfig

CHILD = """
import sys, time
for part in ("imports", "weights", "weights"):
    time.sleep(0.05)
    print("start: " + part, "not a part", sep="\\n", file=sys.stderr, flush=True)
time.sleep(0.1)
print("token", flush=True)
time.sleep(1)  # until the parent has seen it, on a busy machine too
print("start: after the token", file=sys.stderr, flush=True)
"""


def test_parts_last_until_their_ends_are_logged():
    parts = start_parts([sys.executable, "-c", CHILD], {})
    assert list(parts) == ["imports", "weights", FIRST_STEP]
    least = {"imports": 0.05, "weights": 0.1, FIRST_STEP: 0.09}
    assert all(parts[name] >= seconds for name, seconds in least.items())


def test_a_process_that_prints_nothing_is_an_error_with_its_log():
    command = [sys.executable, "-c", "import sys; sys.exit('start: no model')"]
    with pytest.raises(RuntimeError, match="no model"):
        start_parts(command, {})


def test_what_is_started_has_the_options_that_were_given(monkeypatch):
    commands = []

    def started(command, environment):
        commands.append(command)
        return {FIRST_STEP: 1.0}

    monkeypatch.setattr(startup, "start_parts", started)
    options = ["--model", "smollm2-135m", "--kernel-path", "portable", "--no-enable-prefix-caching"]
    assert main(["bench", "startup", "--runs", "1", "--device", "cpu", *options]) == 0
    waits = [command.count("--wait-for-kernels") for command in commands]
    assert waits == [0, 0, 1, 0]  # byte code, empty cache, the rest of the cache, warm
    for command in commands:
        given = command[command.index("Hello") + 1 : command.index("--max-tokens")]
        assert "--no-enable-prefix-caching" in given and "--load-format" in given
        pairs = set(itertools.pairwise(given))
        assert {("--model", "smollm2-135m"), ("--kernel-path", "portable")} <= pairs


def test_a_table_of_the_parts_follows_the_runs(golden, capsys):
    bench_startup(EngineConfig(model=str(golden / "llama_bias"), device="cpu"), runs=1)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("empty kernel cache: first token after ")
    assert out[1].startswith("warm kernel cache: first token after ")
    assert out[2].split() == ["ms", "by", "part", "empty", "warm"]
    assert out[-1].startswith("first token ") and float(out[-1].split()[-1]) > 100
    assert any(line.startswith("imports ") for line in out)
