"""`bench attention`: the program that it times, what it prints; on a GPU, all of it."""

import json

import pytest

from tinyvllm.bench import attention, op_bench
from tinyvllm.bench.synthetic import decode_dims
from tinyvllm.cli.main import main
from tinyvllm.driver.devices import DEVICES
from tinyvllm.ops.executor import described, plan_program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


@pytest.mark.parametrize("head_dim", attention.HEAD_DIMS)
@pytest.mark.parametrize("group", attention.GROUPS)
def test_every_layer_has_one_kernel_that_reads_its_keys_and_values(head_dim, group):
    program = attention.attention_program(head_dim, group, block_size=16)
    dims = {**decode_dims(3, 2048), "SLOTS": 3, "MB": 128, "NB": 384}
    info = DEVICES["sm_90a"]
    assert plan_program(program, dims, DType.BF16, info).arena_bytes > 0
    assert len(program.ops) == attention.LAYERS
    for op in program.ops:
        operands = described(program, op, dims, DType.BF16)
        assert len(op_def(op.kind).launches(operands, info)) == 1
        kv = 3 * 2048 * 2 * attention.KV_HEADS * head_dim * 2
        assert kv <= op_def(op.kind).cost(operands).bytes < 1.1 * kv


def test_a_row_is_printed(capsys):
    attention._print_row(attention.AttentionTime(64, 4, 32, 2048, 34.5, 3.89, 4.13, 0.942))
    out = capsys.readouterr().out
    assert out.split() == ["64", "4", "32", "2048", "34.50", "3.89", "4.13", "94.2%"]


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(op_bench, "cuda_unavailable", lambda: "no driver")
    assert main(["bench", "attention"]) == 1
    assert "bench attention needs a GPU: no driver" in capsys.readouterr().err


@pytest.mark.gpu(alone=True)
def test_bench_attention(device, capsys):
    assert main(["bench", "attention", "--batch", "3", "--context", "700", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["head_dim"], r["group"]) for r in rows] == [
        (d, g) for d in attention.HEAD_DIMS for g in attention.GROUPS
    ]
    assert all(0.01 < r["share"] < 1.5 for r in rows)


@pytest.mark.gpu(alone=True)
def test_rows_beyond_4096_blocks_take_no_longer_than_others(device):
    """Each row has a block for each KV head: 512 rows are 4,096 blocks. Grids beyond once had bytes
    brought to L2 that are not there, at 100 us a row."""
    us = []
    for rows in (512, 536):
        with attention.AttentionBench(device, DType.BF16, 16, 64, 1, rows, 16) as bench:
            us.append(bench.measure().us)
    assert us[1] < 3 * us[0]
