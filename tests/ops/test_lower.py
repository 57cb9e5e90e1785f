"""Which ops the rules fuse and which not, how they pack weights, and that results stay equal."""

import dataclasses

import numpy as np
import pytest
from harness import pack, run_numpy

from tinyvllm.model.config import RopeConfig
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.ops.lower import (
    GATE_UP_INTERLEAVE,
    RULES,
    fuse_matmul_add,
    fuse_rope_kv_write,
    fuse_silu_mul,
    lower,
    merge_qkv,
)
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program, concrete
from tinyvllm.util import DType

K, INNER = 64, 96


@pytest.fixture
def only(monkeypatch):
    """Lowers a program by the given rules alone."""

    def lower_by(program, *rules):
        monkeypatch.setitem(RULES, "test", list(rules))
        return lower(program, "test")

    return lower_by


def kinds(program):
    return [op.kind for op in program.ops]


def new_program():
    p = Program("t")
    p.buffer("x", ("T", K), kind=INPUT)
    p.buffer("x2", ("T", K), kind=INPUT)
    return p


def linear(p, name, n=K, x="x", bias=False, out_kind="temp"):
    k = int(p.shape_of(x)[-1])
    w, b = p.weight(f"{name}.weight", n, k), None
    if bias:
        b = p.weight(f"{name}.bias", n)
    return p.emit("matmul", name, x=x, weight=w, bias=b, out_kind=out_kind)


def check_equal(program, lowered, tokens=5, atol=1e-5):
    """Runs both on random values, with dead buffers poisoned."""
    rng = np.random.default_rng(0)
    dims = {"T": tokens}
    arrays = {
        b.name: rng.standard_normal(concrete(b.shape, dims), np.float32)
        for b in program.of_kind(INPUT)
    }
    arrays |= {
        w.name: rng.standard_normal(w.shape, np.float32) / 8 for w in program.weights.values()
    }
    want, have = (run_numpy(p, dims, arrays) for p in (program, lowered))
    assert want.keys() == have.keys()
    for name in want:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=atol, err_msg=name)


# Gate and up products with SiLU.


def gate_up(gate_bias=False, up_bias=False, up_x="x", inner=INNER, **options):
    p = new_program()
    gate = linear(p, "gate", inner, "x", gate_bias)
    up = linear(p, "up", inner, up_x, up_bias)
    if options.get("swapped"):
        gate, up = up, gate
    y = p.emit("silu_mul", "y", gate=gate, up=up, out_kind=OUTPUT)
    if options.get("read_again"):
        p.emit("add", "z", a=y, b=gate, out_kind=OUTPUT)
    return p


@pytest.mark.parametrize("bias", [False, True])
def test_silu_mul_is_fused_with_interleaved_weights(only, bias):
    p = gate_up(gate_bias=bias, up_bias=bias)
    lowered = only(p, fuse_silu_mul)
    assert kinds(lowered) == ["matmul_silu_mul"]
    assert [part.kind for part in lowered.ops[0].parts] == ["matmul", "matmul", "silu_mul"]
    assert set(lowered.buffers) == {"x", "y"}, "gate and up exist only inside the op"
    weight = lowered.weights[lowered.ops[0].operands["weight"]]
    assert (weight.parts, weight.shape) == (("gate.weight", "up.weight"), (2 * INNER, K))
    assert weight.interleave == GATE_UP_INTERLEAVE == 8
    assert len(lowered.weights) == (2 if bias else 1)
    if bias:
        packed = lowered.weights[lowered.ops[0].operands["bias"]]
        assert (packed.parts, packed.shape) == (("gate.bias", "up.bias"), (2 * INNER,))
        assert packed.interleave == 8
    check_equal(p, lowered)


def test_interleaving_alternates_groups_of_rows(only):
    lowered = only(gate_up(gate_bias=True, up_bias=True), fuse_silu_mul)
    gate = np.arange(INNER, dtype=np.float32)
    arrays = {"gate.weight": np.repeat(gate[:, None], K, 1), "gate.bias": gate}
    arrays |= {"up.weight": -arrays["gate.weight"] - 1, "up.bias": -gate - 1}
    for operand in ("weight", "bias"):
        packed = pack(lowered.weights[lowered.ops[0].operands[operand]], arrays)
        first_column = packed if packed.ndim == 1 else packed[:, 0]
        for j in range(INNER // 8):
            np.testing.assert_array_equal(
                first_column[16 * j : 16 * j + 8], gate[8 * j : 8 * j + 8]
            )
            np.testing.assert_array_equal(
                first_column[16 * j + 8 : 16 * j + 16], -gate[8 * j : 8 * j + 8] - 1
            )


@pytest.mark.parametrize(
    "options",
    [
        {"read_again": True},
        {"gate_bias": True},
        {"up_bias": True},
        {"up_x": "x2"},
        {"swapped": True},
        {"inner": 20},
    ],
)
def test_silu_mul_is_not_fused_where_that_would_change_the_result(only, options):
    p = gate_up(**options)
    assert kinds(only(p, fuse_silu_mul)) == kinds(p)


def test_a_product_that_is_an_output_is_kept(only):
    p = new_program()
    gate = linear(p, "gate", INNER, out_kind=OUTPUT)
    p.emit("silu_mul", "y", gate=gate, up=linear(p, "up", INNER), out_kind=OUTPUT)
    assert kinds(only(p, fuse_silu_mul)) == kinds(p)


# Products of one input.


def qkv(v_x="x", k_bias=False, v_bias=False):
    p = new_program()
    q = linear(p, "q", 128, bias=k_bias)
    k = linear(p, "k", 64, bias=k_bias)
    v = linear(p, "v", 64, v_x, bias=v_bias)
    p.emit("add", "kv", a=k, b=v, out_kind=OUTPUT)
    p.emit("add", "qq", a=q, b=q, out_kind=OUTPUT)
    return p


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_input_are_stacked_and_their_outputs_become_views(only, bias):
    p = qkv(k_bias=bias, v_bias=bias)
    lowered = only(p, merge_qkv)
    assert kinds(lowered) == ["matmul", "add", "add"]
    op = lowered.ops[0]
    joint = op.operands["y"]
    assert lowered.buffers[joint].shape == ("T", 256)
    views = {n: (lowered.buffers[n].parent, lowered.buffers[n].column) for n in "qkv"}
    assert views == {"q": (joint, 0), "k": (joint, 128), "v": (joint, 192)}
    weight = lowered.weights[op.operands["weight"]]
    assert (weight.parts, weight.shape, weight.interleave) == (
        ("q.weight", "k.weight", "v.weight"),
        (256, K),
        0,
    )
    assert ("bias" in op.operands) == bias
    assert p.buffers["q"].parent is None, "the original program is untouched"
    check_equal(p, lowered)


def test_products_of_another_input_stay_apart(only):
    lowered = only(qkv(v_x="x2"), merge_qkv)
    assert kinds(lowered) == ["matmul", "matmul", "add", "add"]
    assert lowered.ops[0].parts and not lowered.ops[1].parts
    check_equal(qkv(v_x="x2"), lowered)


def test_products_with_and_without_bias_stay_apart(only):
    p = qkv(v_bias=True)
    assert kinds(only(p, merge_qkv)) == kinds(p)


def test_products_that_are_outputs_stay_apart(only):
    p = new_program()
    linear(p, "q", 64)
    linear(p, "k", 64, out_kind=OUTPUT)
    linear(p, "v", 64)
    p.emit("add", "y", a="q", b="v", out_kind=OUTPUT)
    lowered = only(p, merge_qkv)
    assert kinds(lowered) == kinds(p)
    check_equal(p, lowered)


# RoPE and KV write.


def rope_write(k_read_again=False, order="qkv", merged=True, out_kind="temp"):
    p = new_program()
    p.buffer("positions", ("T",), DType.I32, INPUT)
    p.buffer("token_slots", ("T",), DType.I32, INPUT)
    p.buffer("block_tables", (1, "SLOTS", "MB"), DType.I32, STATE)
    p.buffer("kv_cache", ("NB", 1, 2, 1, 8, 64), None, STATE)
    p.constant("inv_freq", RopeConfig().inv_freq(64))
    products = {n: linear(p, n, 128 if n == "q" else 64, "x" if merged else n) for n in order}
    q = p.emit(
        "rope",
        "rq",
        x=products["q"],
        positions="positions",
        inv_freq="inv_freq",
        head_dim=64,
        out_kind=OUTPUT,
    )
    k = p.emit(
        "rope",
        "rk",
        x=products["k"],
        positions="positions",
        inv_freq="inv_freq",
        head_dim=64,
        out_kind=out_kind,
    )
    p.emit(
        "kv_write",
        k=k,
        v=products["v"],
        positions="positions",
        token_slots="token_slots",
        block_tables="block_tables",
        kv_cache="kv_cache",
        layer=0,
        group=0,
    )
    if k_read_again:
        p.emit("add", "kk", a=k, b=k, out_kind=OUTPUT)
    return p, q


def test_rope_and_kv_write_are_fused_after_one_product(only):
    p, _ = rope_write()
    lowered = only(p, merge_qkv, fuse_rope_kv_write)
    assert kinds(lowered) == ["matmul", "rope_kv_write"]
    assert lowered.ops[1].attrs == {"layer": 0, "group": 0}
    assert lowered.ops[1].operands["qkv"] == lowered.ops[0].operands["y"]
    assert "rk" not in lowered.buffers, "roped keys go to the cache only"
    tokens = 5
    dims = {"T": tokens, "SLOTS": 2, "MB": 2, "NB": 3}
    rng = np.random.default_rng(1)
    arrays = {
        "x": rng.standard_normal((tokens, K), np.float32),
        "x2": np.zeros((tokens, K), np.float32),
        "positions": np.array([3, 4, 5, 9, 0], np.int32),
        "token_slots": np.array([0, 0, 0, 0, 1], np.int32),
        "block_tables": np.array([[[2, 0], [1, 1]]], np.int32),
        "kv_cache": np.full((3, 1, 2, 1, 8, 64), np.nan, np.float32),
    }
    arrays |= {w.name: rng.standard_normal(w.shape, np.float32) for w in p.weights.values()}
    want, have = run_numpy(p, dims, arrays), run_numpy(lowered, dims, arrays)
    assert np.isfinite(want["kv_cache"]).sum() == tokens * 2 * 64
    for name in ("rq", "kv_cache"):
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"k_read_again": True}, {"out_kind": OUTPUT}, {"order": "qvk"}, {"order": "kqv"}],
)
def test_rope_is_not_fused_where_keys_are_read_again_or_columns_are_in_another_order(only, options):
    p, _ = rope_write(**options)
    lowered = only(p, merge_qkv, fuse_rope_kv_write)
    assert kinds(lowered)[:4] == ["matmul", "rope", "rope", "kv_write"]


def test_rope_of_separate_products_is_not_fused(only):
    p, _ = rope_write()
    assert kinds(only(p, fuse_rope_kv_write)) == kinds(p)


@pytest.mark.parametrize(
    ("op", "operand", "other"),
    [
        ("rope", "inv_freq", "frequencies"),  # of k
        ("rope", "positions", "places"),
        ("kv_write", "positions", "places"),
        ("kv_write", "k", "rq2"),
    ],
)
def test_ropes_and_writes_of_different_things_are_not_fused(only, op, operand, other):
    p, _ = rope_write()
    p.constant("frequencies", RopeConfig(theta=5.0).inv_freq(64))
    p.buffer("places", ("T",), DType.I32, INPUT)
    p.buffer("rq2", ("T", 64), kind=INPUT)
    last = max(i for i, one in enumerate(p.ops) if one.kind == op)
    operands = {**p.ops[last].operands, operand: other}
    p.ops[last] = dataclasses.replace(p.ops[last], operands=operands)
    lowered = only(p, merge_qkv, fuse_rope_kv_write)
    assert kinds(lowered) == ["matmul", "rope", "rope", "kv_write"]


def test_attention_brings_the_weights_of_its_own_layers_gate_and_up_products():
    model = dataclasses.replace(PRESETS["llama-3.2-1b"], num_hidden_layers=2, vocab_size=1000)
    program = lower(step_program(model, "step", block_size=16, phase="decode"), "decode")
    ahead = [op.operands["ahead"] for op in program.ops if op.kind == "rope_attention"]
    assert [program.weights[name].parts for name in ahead] == [
        tuple(f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        for layer in range(2)
    ]
    prefill = lower(step_program(model, "step", block_size=16, phase="prefill"), "prefill")
    assert not any("ahead" in op.operands for op in prefill.ops)


# Residual adds.


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_residual_add_joins_the_product(only, swapped, bias):
    p = new_program()
    d = linear(p, "d", bias=bias)
    a, b = (d, "x2") if swapped else ("x2", d)
    p.emit("add", "y", a=a, b=b, out_kind=OUTPUT)
    lowered = only(p, fuse_matmul_add)
    assert kinds(lowered) == ["matmul_add"]
    assert lowered.ops[0].operands["residual"] == "x2"
    assert ("bias" in lowered.ops[0].operands) == bias
    assert "d" not in lowered.buffers
    check_equal(p, lowered)


def test_residual_add_stays_where_the_product_is_read_again(only):
    p = new_program()
    d = linear(p, "d")
    y = p.emit("add", "y", a="x2", b=d)
    p.emit("add", "z", a=y, b=d, out_kind=OUTPUT)
    assert kinds(only(p, fuse_matmul_add)) == ["matmul", "add", "add"]


def test_product_added_to_itself_stays(only):
    p = new_program()
    d = linear(p, "d")
    p.emit("add", "y", a=d, b=d, out_kind=OUTPUT)
    assert kinds(only(p, fuse_matmul_add)) == ["matmul", "add"]
