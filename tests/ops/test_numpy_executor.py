"""The NumPy executor: arena, views, poison, programs that follow, sizes below the limits."""

import dataclasses

import numpy as np
import pytest
from harness import run_numpy

from tinyvllm.ops import numpy_executor
from tinyvllm.ops.lower import lower
from tinyvllm.ops.numpy_executor import MAX_BOUND, NumpyExecutor
from tinyvllm.ops.program import EXTERNAL, INPUT, OUTPUT, STATE, Program
from tinyvllm.util import DType


def mlp():
    """y = down(silu(gate(x)) * up(x)) + x, and n = norm(y)."""
    p = Program("mlp")
    p.buffer("x", ("T", 32), kind=INPUT)
    for name, n, k in (("gate", 48, 32), ("up", 48, 32), ("down", 32, 48)):
        p.weight(name, n, k)
    p.weight("norm", 32)
    gate = p.emit("matmul", "g", x="x", weight="gate")
    up = p.emit("matmul", "u", x="x", weight="up")
    m = p.emit("silu_mul", "m", gate=gate, up=up)
    d = p.emit("matmul", "d", x=m, weight="down")
    y = p.emit("add", "y", a="x", b=d, out_kind=OUTPUT)
    p.emit("rms_norm", "n", x=y, weight="norm", eps=1e-5, out_kind=OUTPUT)
    return p


def mlp_arrays(tokens, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (tokens, 32), "gate": (48, 32), "up": (48, 32), "down": (32, 48), "norm": (32,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def mlp_float64(arrays):
    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    gate = a["x"] @ a["gate"].T
    y = a["x"] + (gate / (1 + np.exp(-gate)) * (a["x"] @ a["up"].T)) @ a["down"].T
    return {"y": y, "n": y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * a["norm"]}


def assert_close(have, want, rtol=2e-5):
    for name, array in want.items():
        scale = np.abs(array).max()
        np.testing.assert_allclose(have[name], array, rtol=rtol, atol=rtol * scale, err_msg=name)


@pytest.mark.parametrize("phase", ["primitive", "prefill", "decode"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_any_lowering_computes_the_program(phase, tokens):
    arrays = mlp_arrays(tokens)
    have = run_numpy(lower(mlp(), phase), {"T": tokens}, arrays)
    assert_close(have, mlp_float64(arrays))


def test_smaller_sizes_than_the_limits_and_back():
    arrays = mlp_arrays(9)
    executor = NumpyExecutor([mlp()], arrays, {}, {"T": 9}, poison=True)
    for tokens in (9, 2, 5, 2, 9):
        part = {**arrays, "x": mlp_arrays(tokens, seed=tokens)["x"]}
        have = executor.run("mlp", {"T": tokens}, {"x": part["x"]}, ("y", "n")).get()
        assert have["y"].shape == (tokens, 32)
        assert_close(have, mlp_float64(part))


def test_results_are_copies_and_only_what_was_asked_for():
    arrays = mlp_arrays(3)
    executor = NumpyExecutor([mlp()], arrays, {}, {"T": 3})
    first = executor.run("mlp", {"T": 3}, {"x": arrays["x"]}, ("y",)).get()
    kept = first["y"].copy()
    executor.run("mlp", {"T": 3}, {"x": 2 * arrays["x"]}, ())
    assert set(first) == {"y"}
    np.testing.assert_array_equal(first["y"], kept)


def overlap(plan, name, other):
    """The plan with `name` moved onto `other`."""
    offsets = {**plan.offsets, name: plan.offsets[other]}
    return dataclasses.replace(plan, offsets=offsets)


@pytest.mark.parametrize(("name", "other"), [("u", "g"), ("n", "y"), ("m", "g"), ("y", "d")])
def test_buffers_that_wrongly_overlap_change_the_result(monkeypatch, name, other):
    """The planner's right plan gives the right result; a wrong one gives NaN or another."""
    arrays = mlp_arrays(4)
    want = mlp_float64(arrays)
    assert_close(run_numpy(mlp(), {"T": 4}, arrays), want)
    right = numpy_executor.plan_program

    def wrong(*args):
        return overlap(right(*args), name, other)

    monkeypatch.setattr(numpy_executor, "plan_program", wrong)
    with np.errstate(invalid="ignore"):
        have = run_numpy(mlp(), {"T": 4}, arrays)
    bad = [n for n in want if not np.allclose(have[n], want[n], rtol=1e-3, atol=1e-3)]
    assert bad, f"nobody noticed that {name} lies on {other}"


def test_poison_shows_a_read_after_the_last_use(monkeypatch):
    """A planner that overlooks a read: its own check sees it; without that the values are still
    there, by luck, until poisoned."""
    arrays = mlp_arrays(4)
    right = Program.accesses

    def overlooks(self, op):
        reads, writes = right(self, op)
        return [r for r in reads if not (op.kind == "add" and r == "d")], writes

    monkeypatch.setattr(Program, "accesses", overlooks)
    with pytest.raises(ValueError, match=r"op 4 \(add\) reads d after its last use"):
        run_numpy(mlp(), {"T": 4}, arrays)
    monkeypatch.setattr("tinyvllm.ops.executor.check_reads", lambda program, last: None)
    assert_close(run_numpy(mlp(), {"T": 4}, arrays, poison=False), mlp_float64(arrays))
    assert np.isnan(run_numpy(mlp(), {"T": 4}, arrays, poison=True)["y"]).all()


def test_column_views_read_and_write_their_part_of_the_parent():
    p = Program("views")
    p.buffer("x", ("T", 32), kind=INPUT)
    for name, n in (("q", 32), ("k", 16), ("v", 16)):
        p.emit("matmul", name, x="x", weight=p.weight(f"{name}.weight", n, 32))
    p.emit("add", "q2", a="q", b="q", out_kind=OUTPUT)
    p.emit("add", "kv", a="k", b="v", out_kind=OUTPUT)
    lowered = lower(p, "decode")
    assert lowered.buffers["v"].column == 48
    rng = np.random.default_rng(3)
    arrays = {"x": rng.standard_normal((5, 32), np.float32)}
    arrays |= {w.name: rng.standard_normal(w.shape, np.float32) for w in p.weights.values()}
    have = run_numpy(lowered, {"T": 5}, arrays)
    q, k, v = (arrays["x"].astype(np.float64) @ arrays[f"{n}.weight"].T for n in "qkv")
    assert_close(have, {"q2": q + q, "kv": k + v})


def logits_and_follow_up():
    """A program that leaves `h`, and one that goes on from some of its rows."""
    first = Program("first")
    first.buffer("x", ("T", 32), kind=INPUT)
    first.emit("add", "junk", a="x", b="x")
    first.emit("add", "h", a="junk", b="x", out_kind=OUTPUT)
    second = Program("second")
    second.buffer("h", ("T", 32), None, EXTERNAL)
    second.buffer("index", ("N",), DType.I32, INPUT)
    picked = second.emit("select_rows", "picked", x="h", index="index")
    second.emit("add", "twice", a=picked, b=picked, out_kind=OUTPUT)
    return first, second


def test_a_program_that_follows_reads_the_outputs_of_the_one_before():
    x = np.arange(5 * 32, dtype=np.float32).reshape(5, 32)
    executor = NumpyExecutor(logits_and_follow_up(), {}, {}, {"T": 8, "N": 4}, poison=True)
    for tokens, rows in ((5, [4, 0]), (3, [2, 2, 1]), (5, [3])):
        executor.run("first", {"T": tokens}, {"x": x[:tokens] * tokens}, ())
        for _ in range(2):  # the outputs stay until another program runs
            index = np.array(rows, np.int32)
            sizes = {"T": tokens, "N": len(rows)}
            have = executor.run("second", sizes, {"index": index}, ("twice",)).get()
            np.testing.assert_array_equal(have["twice"], 6 * tokens * x[rows])


def test_what_is_followed_may_lie_elsewhere_each_time():
    first, second = logits_and_follow_up()
    other = Program("other")
    other.buffer("x", ("T", 32), kind=INPUT)
    other.emit("add", "h", a="x", b="x", out_kind=OUTPUT)
    other.emit("add", "more", a="h", b="x", out_kind=OUTPUT)
    executor = NumpyExecutor([first, other, second], {}, {}, {"T": 2, "N": 2}, poison=True)
    assert executor.plans["first"].offsets["h"] != executor.plans["other"].offsets["h"]
    inputs = {"x": np.ones((2, 32), np.float32)}
    index = {"index": np.array([0, 1], np.int32)}
    for name, value in (("first", 3), ("other", 2), ("first", 3)):
        executor.run(name, {}, inputs, ())
        have = executor.run("second", {}, index, ("twice",)).get()
        np.testing.assert_array_equal(have["twice"], np.full((2, 32), 2 * value))


def test_zero_sampled_rows_run_nothing_that_depends_on_them():
    p = Program("t")
    p.buffer("x", ("T", 32), kind=INPUT)
    p.buffer("index", ("S",), DType.I32, INPUT)
    p.emit("add", "h", a="x", b="x", out_kind=OUTPUT)
    picked = p.emit("select_rows", "picked", x="h", index="index")
    p.emit(
        "matmul", "logits", x=picked, weight=p.weight("w", 10, 32), dtype=DType.F32, out_kind=OUTPUT
    )
    x = np.ones((3, 32), np.float32)
    executor = NumpyExecutor([p], {"w": np.ones((10, 32), np.float32)}, {}, {"T": 4, "S": 2})
    have = executor.run(
        "t", {"T": 3, "S": 0}, {"x": x, "index": np.empty(0, np.int32)}, ("h", "logits")
    ).get()
    assert have["logits"].shape == (0, 10)
    np.testing.assert_array_equal(have["h"], 2 * x)
    have = executor.run(
        "t", {"T": 3, "S": 1}, {"index": np.array([2], np.int32)}, ("logits",)
    ).get()
    np.testing.assert_array_equal(have["logits"], np.full((1, 10), 64))


def test_states_are_changed_in_place():
    p = Program("t")
    p.buffer("state", (3, 8), kind=STATE)
    p.buffer("x", (3, 8), kind=INPUT)
    p.emit("add", a="state", b="x", y="state")
    state = np.zeros((3, 8), np.float32)
    executor = NumpyExecutor([p], {}, {"state": state}, {})
    for _ in range(3):
        executor.run("t", {}, {"x": np.full((3, 8), 2, np.float32)}, ())
    np.testing.assert_array_equal(state, np.full((3, 8), 6))


@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
def test_round_to_rounds_activations_and_spares_float32_outputs(act):
    p = Program("t")
    p.buffer("x", ("T", 32), kind=INPUT)
    p.weight("w", 40, 32)
    p.emit("matmul", "y", x="x", weight="w", out_kind=OUTPUT)
    p.emit("matmul", "logits", x="x", weight="w", out_kind=OUTPUT, dtype=DType.F32)
    rng = np.random.default_rng(5)
    arrays = {
        "x": rng.standard_normal((3, 32), np.float32),
        "w": rng.standard_normal((40, 32), np.float32),
    }
    have = run_numpy(p, {"T": 3}, arrays, round_to=act)
    np.testing.assert_array_equal(have["y"], act.round(have["logits"]))
    assert (have["y"] != have["logits"]).any()


def test_many_different_sizes_do_not_pile_up():
    executor = NumpyExecutor([mlp()], mlp_arrays(1), {}, {"T": 2 * MAX_BOUND})
    for tokens in range(1, 2 * MAX_BOUND):
        executor.run("mlp", {"T": tokens}, {"x": np.zeros((tokens, 32), np.float32)}, ())
    assert len(executor._bound) == MAX_BOUND
