"""The sweeps on the CPU with a tiny model: what they vary, what they print."""

import json
from dataclasses import replace

import pytest

from tinyvllm.bench.lengths import Lengths, exponential_lengths
from tinyvllm.bench.sweep import bench_sweep, knee, sweep_batches
from tinyvllm.cli.main import main
from tinyvllm.config import EngineConfig
from tinyvllm.util import InputError


@pytest.mark.parametrize(
    ("rates", "suggested"),
    [
        ([(1, 100), (2, 190), (4, 300), (8, 330), (16, 350)], 4),
        ([(1, 100), (2, 110), (4, 200), (8, 210)], 4),  # one small step before a large one
        ([(1, 100), (2, 200), (4, 400)], 4),  # never reached
        ([(1, 100), (2, 110), (4, 100)], 1),
        ([(1, 100), (4, 130), (16, 180)], 16),  # 14 % and 18 % for each doubling
        ([(8, 100)], 8),
    ],
)
def test_the_knee(rates, suggested):
    assert knee(rates) == suggested


@pytest.fixture
def config(golden):
    return EngineConfig(
        model=str(golden / "llama_bias"), device="cpu", max_num_seqs=4, max_num_batched_tokens=128
    )


def test_sweep_as_json(config, capsys):
    lengths = exponential_lengths(8, 12, 24)
    bench_sweep(
        config,
        lengths,
        batches=[4, 1],
        block_sizes=[8, 16],
        thresholds=[0.7, 0.95],
        share=0.5,
        as_json=True,
    )
    found = json.loads(capsys.readouterr().out)
    batches = found["batch"]
    assert [row["batch"] for row in batches] == [1, 4]
    assert batches[1]["kv_bytes"] == 4 * batches[0]["kv_bytes"] > 0
    assert all(row["tokens_per_s"] > 0 and row["pool_used"] > 0 for row in batches)
    assert found["suggested_max_num_seqs"] in (1, 4)
    small, large = found["block_size"]
    assert (small["block_size"], large["block_size"]) == (8, 16)
    assert 0 < small["waste"] < large["waste"] and small["table_bytes"] > large["table_bytes"]
    assert small["tokens_per_s"] > 0 and large["tokens_per_s"] > 0
    assert [row["preemption_threshold"] for row in found["threshold"]] == [0.7, 0.95]
    # The prompts in full, and twice what was found cached of preempted ones.
    prompts = sum(request.input_len for request in lengths)
    for row in found["threshold"]:
        assert row["result"]["prefill_tokens"] >= prompts
        assert row["result"]["output_tokens_per_s"] > 0


def test_sweep_as_tables(config, capsys):
    """From the command line and without a device: the default lengths at block size 16."""
    command = ["bench", "sweep", "--what", "block-size", "--simulate", "--requests", "100"]
    assert main([*command, "--block-sizes", "16", "32", "--max-num-seqs", "32"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].split() == ["block", "waste", "entries", "table", "tokens/s"]
    assert [line.split()[0] for line in lines[1:]] == ["16", "32"]
    assert 0.005 < float(lines[1].split()[1].rstrip("%")) / 100 <= 0.02


def test_lengths_of_a_file(golden, tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("6,4\n" * 3)
    options = ["bench", "sweep", "--model", str(golden / "llama_bias"), "--load-format", "auto"]
    options += ["--device", "cpu", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    options += ["--what", "threshold", "--share", "0.7", "--thresholds", "0.9", "--block-size", "8"]
    assert main([*options, "--lengths", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[0] == "0.90" and float(last[1]) > 0
    path.write_text("6,4\n6,no\n")
    assert main([*options, "--lengths", str(path)]) == 1
    assert "lengths.csv:2: '6,no'" in capsys.readouterr().err
    assert main([*options, "--share", "0"]) == 1
    assert "share=0.0" in capsys.readouterr().err
    assert main([*options, "--requests", "0"]) == 1
    assert "requests=0" in capsys.readouterr().err


def test_batches_that_do_not_fit_are_left_out(config):
    small = {"num_gpu_blocks_override": 2 * (64 // 16 + 3)}
    config = EngineConfig(**{**vars(config), **small})
    assert [row.batch for row in sweep_batches(config, [1, 2, 4], 64)] == [1, 2]
    with pytest.raises(InputError, match="at least 1"):
        sweep_batches(config, [0, 1], 64)
    with pytest.raises(InputError, match="batch 4 does not fit into 14 KV blocks"):
        sweep_batches(config, [4], 64)


def test_a_batch_may_use_all_blocks(config):
    """Prompts of 376 tokens fill 24 of the 28 blocks of each sequence, more than 0.85 of all."""
    config = replace(config, max_num_batched_tokens=1024)
    assert [row.batch for row in sweep_batches(config, [4], 400)] == [4]


def test_rows_that_never_decode_together_are_an_error(config):
    with pytest.raises(InputError, match=r"batch 4, context 1400: .*max_num_batched_tokens=128"):
        sweep_batches(config, [4], 1400)


def test_one_request_of_one_token(config, capsys):
    bench_sweep(config, [Lengths(1, 1)], parts=["block-size"], block_sizes=[8], as_json=True)
    assert json.loads(capsys.readouterr().out)["block_size"][0]["waste"] == 7 / 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sizes": [8, 0]}, "block_size=0: must be one of"),
        ({"block_sizes": [8, 7]}, "block_size=7: must be one of"),
        ({"thresholds": [0.7, 1.5]}, "preemption_threshold=1.5"),
        ({"share": 0}, "share=0"),
        ({"simulate": True, "parts": ["batch", "threshold"]}, "simulate"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(config, capsys, options, message):
    with pytest.raises(InputError, match=message):
        bench_sweep(config, [Lengths(1, 1)], **options)
    assert capsys.readouterr().out == ""


def test_simulation_needs_no_model(capsys):
    config = EngineConfig(model="not there")
    bench_sweep(config, [Lengths(1, 1)], block_sizes=[8], simulate=True, as_json=True)
    assert list(json.loads(capsys.readouterr().out)) == ["block_size"]
