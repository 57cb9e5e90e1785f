from dataclasses import replace

import numpy as np
import pytest

from tinyvllm.ops.program import INPUT, OUTPUT, TEMP, Op, Program, concrete, layer_of, role_of
from tinyvllm.util import DType


@pytest.fixture
def p():
    program = Program("t")
    program.buffer("x", ("T", 16), kind=INPUT)
    program.buffer("ids", ("T",), DType.I32, INPUT)
    program.weight("w", 24, 16)
    program.weight("norm", 16)
    return program


def test_emit_declares_the_output_with_the_shape_of_the_contract(p):
    assert p.emit("matmul", "y", x="x", weight="w") == "y"
    y = p.buffers["y"]
    assert (y.shape, y.dtype, y.kind) == (("T", 24), None, TEMP)
    assert p.ops == [Op("matmul", {"x": "x", "weight": "w", "y": "y"})]


def test_emit_takes_dtype_and_kind_of_the_output(p):
    p.emit("matmul", "y", x="x", weight="w", bias=None, dtype=DType.F32, out_kind=OUTPUT)
    assert (p.buffers["y"].dtype, p.buffers["y"].kind) == (DType.F32, OUTPUT)
    assert "bias" not in p.ops[0].operands


def test_emit_writes_buffers_that_are_given(p):
    p.buffer("out", ("T", 16), kind=OUTPUT)
    assert p.emit("rms_norm", x="x", weight="norm", eps=1e-5, y="out") == "out"
    assert p.ops[0].attrs == {"eps": 1e-5}
    assert set(p.buffers) == {"x", "ids", "out"}


@pytest.mark.parametrize(
    ("kind", "operands", "message"),
    [
        ("matmul", {"x": "x"}, "operand weight is missing"),
        ("matmul", {"x": "ids", "weight": "w"}, r"x=ids has shape \('T',\)"),
        ("matmul", {"x": "x", "weight": "w", "bias": "norm"}, r"bias=norm has shape \(16,\)"),
        ("rms_norm", {"x": "x", "weight": "norm"}, r"attributes \[\], not \['eps'\]"),
        (
            "rms_norm",
            {"x": "x", "weight": "norm", "eps": 1, "bias": "norm"},
            r"unknown operands \['bias'\]",
        ),
        ("add", {"a": "x", "b": "x", "alpha": 2}, r"unknown operands \['alpha'\]"),
    ],
)
def test_emit_refuses_what_breaks_the_contract(p, kind, operands, message):
    with pytest.raises(ValueError, match=f"{kind}: .*{message}"):
        p.emit(kind, "y", **operands)
    assert p.ops == []


def test_emit_refuses_an_output_of_another_shape(p):
    p.buffer("out", ("T", 16))
    with pytest.raises(ValueError, match="y=out has shape"):
        p.emit("matmul", x="x", weight="w", y="out")


def test_an_unknown_op_or_operand_name_is_an_error(p):
    with pytest.raises(KeyError, match="soft_max"):
        p.emit("soft_max", "y", x="x")
    with pytest.raises(KeyError, match="nowhere"):
        p.emit("add", "y", a="x", b="nowhere")


def test_declaring_a_buffer_again_must_agree(p):
    assert p.buffer("x", ("T", 16), kind=INPUT) == "x"
    with pytest.raises(ValueError, match="buffer x declared twice"):
        p.buffer("x", ("T", 17), kind=INPUT)


def test_accesses_are_buffers_with_views_resolved(p):
    p.emit("matmul", "y", x="x", weight="w")
    p.buffers["left"] = replace(p.buffers["x"], name="left", shape=("T", 24), parent="y")
    p.buffer("sum", ("T", 24), kind=OUTPUT)
    op = Op("add", {"a": "left", "b": "y", "y": "sum"})
    assert p.accesses(op) == (["y", "y"], ["sum"])
    assert p.accesses(p.ops[0]) == (["x"], ["y"]), "weights are no buffers"


def test_of_kind_skips_views_and_keeps_the_order(p):
    p.buffers["left"] = replace(p.buffers["x"], name="left", shape=("T", 8), parent="x")
    assert [b.name for b in p.of_kind(INPUT)] == ["x", "ids"]
    assert list(p.of_kind(OUTPUT)) == []


def test_with_ops_keeps_only_what_is_used(p):
    p.constant("c", np.zeros(3, np.float32))
    p.emit("rms_norm", "h", x="x", weight="norm", eps=1e-5)
    p.emit("matmul", "y", x="h", weight="w", out_kind=OUTPUT)
    smaller = p.with_ops(p.ops[:1])
    assert set(smaller.buffers) == {"x", "h"}
    assert set(smaller.weights) == {"norm"}
    assert set(p.buffers) == {"x", "ids", "h", "y"}, "the original is untouched"
    assert smaller.constants.keys() == {"c"} and smaller.shape_of("c") == (3,)


def test_with_ops_keeps_what_views_are_columns_of_and_what_lies_between_parts(p):
    p.emit("matmul", "y", x="x", weight="w")
    p.buffers["left"] = replace(p.buffers["x"], name="left", shape=("T", 24), parent="y")
    for name in ("between", "inside", "z"):
        p.buffer(name, ("T", 24))
    parts = (
        Op("add", {"a": "left", "b": "left", "y": "inside"}),
        Op("add", {"a": "inside", "b": "left", "y": "between"}),
    )
    fused = Op("add", {"a": "left", "b": "left", "y": "z"}, {}, parts, (p.buffers["inside"],))
    assert set(p.with_ops([fused]).buffers) == {"y", "left", "between", "z"}


def test_concrete_fills_in_sizes():
    assert concrete(("T", 4, "R"), {"T": 3, "R": 0}) == (3, 4, 0)


def test_role_is_the_name_without_the_layer():
    assert role_of("layer12.q_proj+") == role_of("layer3.q_proj+") == "q_proj+"
    assert role_of("hidden") == "hidden"
    assert [layer_of(name) for name in ("layer12.q", "layer0.q", "hidden")] == [12, 0, None]
