"""PyTorch as a rival: said clearly where it is missing; where it is, the same values."""

import json
import sys

import pytest

from tinyvllm.bench.rivals import Torch, in_turns
from tinyvllm.cli.main import main
from tinyvllm.util import InputError


def test_times_are_taken_in_turns_and_the_middle_one_counts():
    order = []

    def run(name, times):
        def once():
            order.append(name)
            return next(times)

        return once

    runs = [run("a", iter([3.0, 1.0, 2.0])), run("b", iter([5.0, 9.0, 7.0]))]
    assert in_turns(runs, 3) == [2.0, 7.0]
    assert order == ["a", "b"] * 3


def test_without_pytorch_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="--torch compares with PyTorch, which is not here"):
        Torch(0)


def test_decode_attention_has_no_rival(capsys):
    assert main(["bench", "attention", "--torch"]) == 1
    assert "--phase prefill" in capsys.readouterr().err


@pytest.mark.gpu(alone=True)
def test_rivals_are_timed_and_compute_the_same(device, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    from tinyvllm.bench import attention_prefill, matmul

    checked = []

    def check_product(bench, rates, rival):
        row = measure_product(bench, rates, rival)
        executor = bench.executor
        x, weight = (rival.tensor(executor.array(name)) for name in ("x", bench._weights[-1]))
        want = torch.mm(x, weight.T).float().cpu().numpy()
        got = executor.read("matmul", bench.dims, "y")
        assert abs(got - want).max() < 0.02 * abs(want).max()
        launch = bench.launches()[0].launch
        names = [name for _, name in launch.spec.kernel.params]
        assert launch.args[names.index("M")] == row.rows  # not those with the room
        checked.append("matmul")
        return row

    def check_attention(bench, rival):
        row = measure_attention(bench, rival)
        head_dim, _, batch, length = bench._shape
        q, k, v = bench._unpaged(rival)
        attend = torch.nn.functional.scaled_dot_product_attention
        want = attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        got = bench.executor.read("attention", bench.dims, "y").reshape(batch, length, -1, head_dim)
        assert abs(got - want.float().cpu().numpy()).max() < 0.05
        checked.append("attention")
        return row

    measure_product = matmul.ProductBench.measure
    measure_attention = attention_prefill.PrefillAttentionBench.measure
    monkeypatch.setattr(matmul.ProductBench, "measure", check_product)
    monkeypatch.setattr(attention_prefill.PrefillAttentionBench, "measure", check_attention)
    for argv in (
        ["matmul", "--rows", "300", "--shapes", "576x1024"],
        ["attention", "--phase", "prefill", "--batch", "2", "--context", "700"],
    ):
        assert main(["bench", *argv, "--torch", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert all(0.1 < r["torch_us"] / r["us"] < 20 for r in rows)
    assert checked == ["matmul"] + ["attention"] * 8
