"""`bench matmul`: the program that it times, what it prints; on a GPU, all of it."""

import json

import pytest

from tinyvllm.bench import matmul, op_bench
from tinyvllm.bench.matmul import ProductTime, model_shapes, product_program
from tinyvllm.cli.main import main
from tinyvllm.driver.devices import DEVICES
from tinyvllm.model.hub import resolve_model
from tinyvllm.ops.executor import described, plan_program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


def test_shapes_are_those_of_the_models_layers():
    model = resolve_model("llama-3.2-1b", "dummy", None).config
    assert model_shapes(model) == [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]


def test_each_product_reads_other_weights():
    program, dims, info = product_program(3072, 2048, 4), {"T": 1024}, DEVICES["sm_90a"]
    assert len({op.operands["weight"] for op in program.ops}) == len(program.ops) == 4
    # One result's memory serves all.
    assert plan_program(program, dims, DType.BF16, info).arena_bytes == 1024 * 3072 * 2
    op = described(program, program.ops[0], dims, DType.BF16)
    assert op_def("matmul").cost(op).flops == 2 * 1024 * 3072 * 2048


def test_a_row_is_printed_with_and_without_its_rival():
    row = ProductTime(1024, 3072, 2048, "some_kernel<2>", 18.5, 16.5, 696.5)
    words = ["1024", "3072", "2048", "18.50", "16.50", "1.12", "696.5"]
    assert matmul._line(row).split() == [*words, "some_kernel<2>"]
    row = ProductTime(1024, 3072, 2048, "some_kernel<2>", 18.5, 16.5, 696.5, 19.0)
    assert matmul._line(row).split() == [*words, "19.00", "1.027", "some_kernel<2>"]
    assert len(matmul._head(True).split()) == len(matmul._line(row).split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rows", "0"], "rows=0: must be from 1 to 1048576"),
        (["--rows", "64", "1048577"], "rows=1048577: must be from 1 to 1048576"),
        (["--shapes", "0x64"], "N=0: must be from 1 to 4194304"),
        (["--shapes", "64x0"], "K=0: must be from 8 to 1048576"),
        (["--shapes", "64x64", "64x16777216"], "K=16777216: must be from 8 to 1048576"),
        (["--shapes", "64x12"], "K=12: must be a multiple of 8"),
    ],
)
def test_bad_sizes_are_named(argv, message, capsys):
    assert main(["bench", "matmul", *argv]) == 1
    assert message in capsys.readouterr().err


def test_a_shape_is_two_numbers(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "matmul", "--shapes", "3072"])
    assert "'3072'" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(op_bench, "cuda_unavailable", lambda: "no driver")
    assert main(["bench", "matmul"]) == 1
    assert "bench matmul needs a GPU: no driver" in capsys.readouterr().err


@pytest.mark.gpu(alone=True)
def test_bench_matmul(device, capsys):
    argv = ["--rows", "1", "200", "--shapes", "576x1024", "--json"]
    assert main(["bench", "matmul", *argv]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["rows"], r["n"], r["k"]) for r in rows] == [(1, 576, 1024), (200, 576, 1024)]
    assert all(0 < r["floor_us"] < 2 * r["us"] and r["rival_us"] is None for r in rows)
