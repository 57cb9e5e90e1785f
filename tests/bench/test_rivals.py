"""Rivals: files that have none are named; PyTorch's, where it is, computes the same."""

import json
from pathlib import Path

import pytest

from tinyvllm.bench.rivals import in_turns, load_rival
from tinyvllm.cli.main import main
from tinyvllm.util import InputError

TORCH = str(Path(__file__).parent / "torch_rival.py")


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


def test_a_rival_is_opened_for_the_gpu(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def open_rival(index):\n    return ('mine', index)\n")
    assert load_rival(str(path), 3) == ("mine", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("x = 1", "has no attribute 'open_rival'"),
        (None, "No such file"),
    ],
)
def test_files_without_a_rival_are_named(tmp_path, text, message):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_rival(str(path), 0)
    assert str(error.value).startswith(f"--rival {path}: ")


def test_a_rival_is_python(tmp_path):
    with pytest.raises(InputError, match="must be a Python file"):
        load_rival(str(tmp_path / "torch"), 0)


def test_decode_attention_has_no_rival(capsys):
    assert main(["bench", "attention", "--rival", TORCH]) == 1
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
        arrays = [bench.executor.array(name) for name in ("q", "kv_cache", "block_tables")]
        q, k, v = rival.unpaged(*arrays, length)
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
        assert main(["bench", *argv, "--rival", TORCH, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert all(0.1 < r["rival_us"] / r["us"] < 20 for r in rows)
    assert checked == ["matmul"] + ["attention"] * 8
