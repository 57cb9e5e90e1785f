"""`bench attention --phase prefill`: the program that it times; on a GPU, all of it."""

import json

import pytest

from tinyvllm.bench import attention_prefill, op_bench
from tinyvllm.bench.attention import GROUPS, HEAD_DIMS, KV_HEADS
from tinyvllm.bench.attention_prefill import PrefillAttentionTime, prefill_program
from tinyvllm.bench.synthetic import prefill_dims
from tinyvllm.cli.main import main
from tinyvllm.driver.devices import DEVICES
from tinyvllm.ops.executor import described, plan_program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_one_kernel_attends_for_all_prompts(head_dim, group):
    program = prefill_program(head_dim, group, block_size=16)
    dims = {**prefill_dims(2, 1000), "SLOTS": 2, "MB": 63, "NB": 126}
    info = DEVICES["sm_90a"]
    width = KV_HEADS * group * head_dim
    assert plan_program(program, dims, DType.BF16, info).arena_bytes >= 2000 * width * 2
    (op,) = program.ops
    (launch,) = op_def(op.kind).launches(described(program, op, dims, DType.BF16), info)
    assert launch.spec.kernel.entry == "attention_prefill_hopper_kernel"


def test_a_row_is_printed_with_and_without_its_rival():
    row = PrefillAttentionTime(64, 4, 1, 8192, 530.4, 518.2)
    words = ["64", "4", "1", "8192", "530.40", "518.2"]
    assert attention_prefill._line(row).split() == words
    row = PrefillAttentionTime(64, 4, 1, 8192, 530.4, 518.2, 636.0, 432.1)
    assert attention_prefill._line(row).split() == [*words, "636.00", "432.1", "1.199"]


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(op_bench, "cuda_unavailable", lambda: "no driver")
    assert main(["bench", "attention", "--phase", "prefill"]) == 1
    assert "bench attention needs a GPU: no driver" in capsys.readouterr().err


@pytest.mark.gpu(alone=True)
def test_bench_attention_of_prompts(device, capsys):
    argv = ["--phase", "prefill", "--batch", "2", "--context", "700", "--json"]
    assert main(["bench", "attention", *argv]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["head_dim"], r["group"]) for r in rows] == [
        (d, g) for d in HEAD_DIMS for g in GROUPS
    ]
    for r in rows:
        assert r["tflops"] == pytest.approx(
            4 * 700**2 * 8 * r["group"] * r["head_dim"] / r["us"] / 1e6
        )
