"""Modes of preemption against each other, on the CPU with a tiny model."""

import json

from tinyvllm.cli.main import main

MODES = ["unlimited", "recompute", "swap", "auto"]


def preemption(golden, *options):
    command = ["bench", "preemption", "--model", str(golden / "llama_bias"), "--device", "cpu"]
    command += ["--load-format", "auto", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"]
    command += ["--sequences", "6", "--input-len", "16", "--output-len", "32"]
    return main([*command, *options])


def test_each_mode_runs_with_the_share_of_blocks(golden, capsys):
    options = ["--share", "0.4", "--runs", "2", "--block-sizes", "8", "16"]
    assert preemption(golden, *options, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["block_size"], row["mode"]) for row in rows] == [
        (size, mode) for size in (8, 16) for mode in MODES
    ]
    for row in rows:
        result, needed = row["result"], 6 * 48 // row["block_size"]
        unlimited = row["mode"] == "unlimited"
        assert row["num_blocks"] >= needed if unlimited else row["num_blocks"] == int(0.4 * needed)
        count = result["num_preemptions_recompute"] + result["num_preemptions_swap"]
        assert (count == 0) is unlimited
        assert result["output_tokens_per_s"] > 0


def test_the_table(golden, capsys):
    assert preemption(golden, "--runs", "1", "--block-sizes", "16", "--share", "0.4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 sequences, 16 tokens in, 32 out, 40% of" in lines[0]
    assert [line.split()[:2] for line in lines[2:]] == [["16", mode] for mode in MODES]


def test_bad_sizes(golden, capsys):
    for option, name in (("--sequences", "sequences"), ("--output-len", "output_len")):
        assert preemption(golden, option, "0") == 1
        assert f"{name}=0" in capsys.readouterr().err
    for options, message in (
        (("--block-sizes", "8", "7"), "block_size=7"),
        (("--share", "nan"), "share=nan"),
        (("--swap-space", "0"), "swap_space=0"),
    ):
        assert preemption(golden, *options) == 1
        found = capsys.readouterr()
        assert message in found.err and found.out == ""
