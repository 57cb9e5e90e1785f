import numpy as np
import pytest

from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.memory.plan import Lifetime
from tinyvllm.ops.executor import (
    InputLayout,
    Recent,
    bind,
    check_reads,
    described,
    follows,
    lifetimes,
    plan_program,
    writes_nothing,
)
from tinyvllm.ops.lower import lower
from tinyvllm.ops.program import EXTERNAL, INPUT, OUTPUT, STATE, Buffer, Op, Program
from tinyvllm.util import DType

H200 = DeviceInfo("H200", (9, 0), 132, 227 << 10, 141 << 30)


def chain():
    """x -> a -> b -> y, with `a` read again at the end."""
    p = Program("chain")
    p.buffer("x", ("T", 8), kind=INPUT)
    p.emit("add", "a", a="x", b="x")
    p.emit("add", "layer0.b", a="a", b="x")
    p.emit("add", "y", a="layer0.b", b="a", out_kind=OUTPUT)
    p.emit("add", "z", a="y", b="a", out_kind=OUTPUT, dtype=DType.F32)
    return p


def test_lifetimes_run_from_the_write_to_the_last_read_and_outputs_to_the_end():
    assert lifetimes(chain(), {"T": 3}, DType.BF16, None) == [
        Lifetime("a", 48, 0, 3, "a"),
        Lifetime("layer0.b", 48, 1, 2, "b"),
        Lifetime("y", 48, 2, 4, "y"),
        Lifetime("z", 96, 3, 4, "z"),
    ]


def test_what_nobody_reads_lives_during_its_op():
    p = chain()
    p.emit("add", "unused", a="x", b="x")
    assert Lifetime("unused", 48, 4, 4, "unused") in lifetimes(p, {"T": 3}, DType.BF16, None)


def test_reading_what_nothing_has_written_is_an_error():
    p = chain()
    p.ops.reverse()
    with pytest.raises(ValueError, match=r"chain: op 0 \(add\) reads y before it is written"):
        lifetimes(p, {"T": 3}, DType.BF16, None)


def test_views_count_as_their_parent():
    p = Program("views")
    p.buffer("x", ("T", 64), kind=INPUT)
    for name in ("q", "k"):
        p.emit("matmul", name, x="x", weight=p.weight(f"{name}.weight", 64, 64))
    p.emit("add", "y", a="q", b="q", out_kind=OUTPUT)
    p.emit("add", "z", a="k", b="y", out_kind=OUTPUT)
    lives = lifetimes(lower(p, "decode"), {"T": 2}, DType.F32, None)
    assert [(b.size, b.first, b.last) for b in lives if b.name.endswith("+")] == [(1024, 0, 2)]
    assert {b.name for b in lives}.isdisjoint("qk")


def test_scratch_is_planned_for_its_op_alone(monkeypatch):
    p = chain()
    from tinyvllm.ops.registry import op_def

    monkeypatch.setattr(
        op_def("add"), "scratch", lambda a, device: a.a.shape[0] * 100, raising=False
    )
    scratch = [b for b in lifetimes(p, {"T": 7}, DType.BF16, H200) if "scratch" in b.name]
    assert [(b.size, b.first, b.last) for b in scratch] == [(700, i, i) for i in range(4)]
    assert not any("scratch" in b.name for b in lifetimes(p, {"T": 7}, DType.BF16, None))
    plan = plan_program(p, {"T": 7}, DType.BF16, H200)
    assert {f"scratch.{i}" for i in range(4)} < set(plan.offsets)


def test_bind_fills_absent_operands_and_passes_attributes():
    p = Program("t")
    p.buffer("x", ("T", 8), kind=INPUT)
    p.emit("matmul", "y", x="x", weight=p.weight("w", 4, 8))
    a = bind(p.ops[0], {"T": 2}, DType.FP16, lambda name: f"<{name}>", scratch=512)
    assert (a.x, a.weight, a.bias, a.y) == ("<x>", "<w>", None, "<y>")
    assert (a.act, a.scratch, a.dims) == (DType.FP16, 512, {"T": 2})
    with pytest.raises(AttributeError, match="residual"):
        _ = a.residual


def test_described_gives_shapes_and_strides_of_views():
    p = Program("t")
    p.buffer("x", ("T", 8), kind=INPUT)
    p.emit("matmul", "y", x="x", weight=p.weight("w", 32, 8))
    p.buffers["left"] = Buffer("left", ("T", 16), None, parent="y", column=8)
    p.constant("c", np.zeros(16, np.float32))
    a = described(
        p, Op("rms_norm", {"x": "left", "weight": "c"}, {"eps": 1e-5}), {"T": 5}, DType.BF16
    )
    assert (a.x.shape, a.x.row_stride, a.x.ptr, a.x.dtype) == ((5, 16), 32, 16, DType.BF16)
    assert (a.weight.shape, a.weight.dtype) == ((16,), DType.F32)
    assert a.y is None


def test_an_op_whose_outputs_are_empty_is_skipped():
    p = Program("t")
    p.buffer("x", ("S", 8), kind=INPUT)
    p.buffer("state", (4, 8), kind=STATE)
    p.emit("add", "y", a="x", b="x")
    assert writes_nothing(p, p.ops[0], {"S": 0})
    assert not writes_nothing(p, p.ops[0], {"S": 1})
    assert not writes_nothing(p, Op("add", {"a": "state", "b": "state", "y": "state"}), {"S": 0})


def test_follows_says_whether_outputs_of_another_program_are_read():
    p = chain()
    assert not follows(p)
    p.buffer("before", ("T", 8), None, EXTERNAL)
    assert follows(p)


def test_inputs_lie_one_after_another_aligned_in_order():
    buffers = [
        Buffer("a", ("R",), DType.I32, INPUT),
        Buffer("b", (3, "R"), DType.I32, INPUT),
        Buffer("c", ("T",), DType.I32, INPUT),
    ]
    layout = InputLayout.of(buffers, {"R": 5, "T": 1})
    assert layout.offsets == {"a": 0, "b": 32, "c": 96}
    assert layout.num_bytes == 112
    assert InputLayout.of([], {}) == InputLayout({}, 0)


def test_recent_keeps_what_was_used_last_and_drops_the_rest():
    dropped = []
    recent = Recent(3, dropped.append)
    for key in "abc":
        recent.put(key, key.upper())
    assert recent.get("a") == "A" and recent.get("d") is None
    recent.put("d", "D")
    recent.put("e", "E")
    assert dropped == ["B", "C"] and len(recent) == 3
    assert [recent.get(key) for key in "abcde"] == ["A", None, None, "D", "E"]
    recent.clear()
    assert sorted(dropped) == ["A", "B", "C", "D", "E"] and len(recent) == 0


def test_a_primitive_inside_a_fused_op_must_not_read_too_late():
    """What a fused op's parts read counts: the fused op itself does not name it here."""
    p = chain()
    check_reads(p, {"a": 3, "layer0.b": 2, "y": 3, "x": 1})
    late = Op("add", {"a": "x", "b": "x", "y": "z"}, {}, (Op("add", {"a": "a", "b": "x"}),))
    p.ops.append(late)
    with pytest.raises(ValueError, match=r"chain: op 4 \(add\) reads a after its last use"):
        check_reads(p, {"a": 3, "layer0.b": 2, "y": 3, "x": 4})
    with pytest.raises(ValueError, match="reads a after its last use"):
        lifetimes(p, {"T": 3}, DType.BF16, None)


def test_a_buffer_that_no_op_uses_has_no_place():
    p = chain()
    p.buffer("never", ("T", 8))
    assert "never" not in {b.name for b in lifetimes(p, {"T": 3}, DType.BF16, None)}
