"""Rotary embedding and KV writes: the references, and the kernels up to the longest positions."""

import re

import numpy as np
import pytest
from harness import assert_close_to_twin, check_cuda, run_cuda, run_numpy

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.ops import rope
from tinyvllm.ops.lower import lower
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.util import DType

LAYERS, LAYER = 2, 1
POSITIONS = [0, 1, 17, 63, 1000, 4095, 99999, 131071]


def inv_freq(head_dim):
    return (500000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def rope_program(heads, head_dim):
    p = Program("test")
    x = p.buffer("x", ("T", heads * head_dim), kind=INPUT)
    p.buffer("positions", ("T",), DType.I32, INPUT)
    p.emit(
        "rope",
        "y",
        x=x,
        positions="positions",
        head_dim=head_dim,
        inv_freq=p.constant("inv_freq", inv_freq(head_dim)),
        out_kind=OUTPUT,
    )
    return p


def kv_buffers(p, kv_heads, head_dim, block_size):
    p.buffer("kv_cache", ("NB", LAYERS, 2, kv_heads, block_size, head_dim), kind=STATE)
    p.buffer("block_tables", (2, "SLOTS", "MB"), DType.I32, STATE)
    p.buffer("token_slots", ("T",), DType.I32, INPUT)
    return {
        "kv_cache": "kv_cache",
        "block_tables": "block_tables",
        "token_slots": "token_slots",
        "positions": "positions",
        "layer": LAYER,
        "group": 1,
    }


def kv_write_program(kv_heads, head_dim, block_size):
    p = Program("test")
    k, v = (p.buffer(n, ("T", kv_heads * head_dim), kind=INPUT) for n in "kv")
    p.buffer("positions", ("T",), DType.I32, INPUT)
    p.emit("kv_write", k=k, v=v, **kv_buffers(p, kv_heads, head_dim, block_size))
    return p


def layer_program(heads, kv_heads, head_dim, block_size, hidden, bias=False):
    """Projections, rope and KV write as a decoder layer has them: lowering fuses them."""
    p = Program("test")
    x = p.buffer("x", ("T", hidden), kind=INPUT)
    p.buffer("positions", ("T",), DType.I32, INPUT)
    freq = p.constant("inv_freq", inv_freq(head_dim))

    def linear(name, heads):
        weight = p.weight(f"{name}.w", heads * head_dim, hidden)
        b = p.weight(f"{name}.b", heads * head_dim) if bias else None
        return p.emit("matmul", name, x=x, weight=weight, bias=b)

    q, k, v = linear("q", heads), linear("k", kv_heads), linear("v", kv_heads)
    p.emit(
        "rope",
        "q_roped",
        x=q,
        positions="positions",
        inv_freq=freq,
        head_dim=head_dim,
        out_kind=OUTPUT,
    )
    k = p.emit("rope", "k_roped", x=k, positions="positions", inv_freq=freq, head_dim=head_dim)
    p.emit("kv_write", k=k, v=v, **kv_buffers(p, kv_heads, head_dim, block_size))
    return p


def problem(kv_heads, head_dim, block_size, positions=POSITIONS, seed=0):
    """One token in each sequence; the cache is poisoned, entries not needed point nowhere."""
    rng = np.random.default_rng(seed)
    tokens = len(positions)
    at = np.array(positions, np.int32)
    slots = rng.permutation(tokens + 1)[:tokens].astype(np.int32)
    tables = np.full((2, tokens + 1, max(positions) // block_size + 1), 1 << 30, np.int32)
    blocks = rng.permutation(tokens + 2)[:tokens]
    tables[1, slots, at // block_size] = blocks
    cache = np.full((tokens + 2, LAYERS, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
    dims = {"T": tokens, "NB": len(cache), "SLOTS": tables.shape[1], "MB": tables.shape[2]}
    arrays = {"kv_cache": cache, "block_tables": tables, "token_slots": slots, "positions": at}
    return dims, arrays, blocks


def exact_rope(x, positions, head_dim):
    """float64 from the float32 angle on, one pair at a time."""
    y = np.empty(x.shape)
    freq = inv_freq(head_dim)
    for t, position in enumerate(positions):
        for i in range(head_dim // 2):
            angle = float(np.float32(position) * freq[i])
            low, high = x[t, i::head_dim], x[t, i + head_dim // 2 :: head_dim]
            y[t, i::head_dim] = low * np.cos(angle) - high * np.sin(angle)
            y[t, i + head_dim // 2 :: head_dim] = high * np.cos(angle) + low * np.sin(angle)
    return y


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_reference(head_dim):
    x = np.random.default_rng(0).standard_normal((len(POSITIONS), 3 * head_dim), np.float32)
    positions = np.array(POSITIONS, np.int32)
    got = run_numpy(rope_program(3, head_dim), {"T": len(x)}, {"x": x, "positions": positions})
    np.testing.assert_allclose(got["y"], exact_rope(x, POSITIONS, head_dim), atol=2e-6)


PADDING = [2, len(POSITIONS) - 1]  # tokens


def with_padding(arrays):
    """Some tokens belong to no slot: what they would have written must stay as it is."""
    arrays["token_slots"][PADDING], arrays["positions"][PADDING] = -1, 0
    return arrays


@pytest.mark.parametrize("block_size", [8, 64])
def test_kv_write_reference(block_size):
    dims, arrays, blocks = problem(3, 64, block_size)
    with_padding(arrays)
    k, v = np.random.default_rng(1).standard_normal((2, len(POSITIONS), 3 * 64), np.float32)
    got = run_numpy(kv_write_program(3, 64, block_size), dims, arrays | {"k": k, "v": v})
    want = arrays["kv_cache"].copy()
    for t, position in enumerate(POSITIONS):
        for h in range(3 * (t not in PADDING)):
            want[blocks[t], LAYER, 0, h, position % block_size] = k[t, 64 * h : 64 * h + 64]
            want[blocks[t], LAYER, 1, h, position % block_size] = v[t, 64 * h : 64 * h + 64]
    np.testing.assert_array_equal(got["kv_cache"], want)


def test_half_turns_in_two_floats_keep_the_angle():
    """The reduction of rotation.cuh, in NumPy: what it loses against the float32 angle."""
    f32 = np.float32
    text = (cuda_src_dir() / "include" / "rotation.cuh").read_text()
    inv_pi = float(re.search(r"kInvPi = ([\d.]+)f;", text).group(1))
    angle = np.arange(0, 131072, 13).astype(f32)[:, None] * inv_freq(64)
    high = angle * f32(inv_pi)
    rest = (angle.astype(np.float64) * float(f32(inv_pi)) - high).astype(f32)
    low = (angle.astype(np.float64) * float(f32(inv_pi - float(f32(inv_pi)))) + rest).astype(f32)
    turns = (high - 2 * np.rint(f32(0.5) * high)) + low
    assert turns.dtype == f32
    for function in (np.sin, np.cos):
        error = function(np.pi * turns.astype(np.float64)) - function(angle.astype(np.float64))
        assert np.abs(error).max() < 2e-7


def test_constants_are_those_of_the_kernels():
    text = (cuda_src_dir() / "rope.cu").read_text()
    constants = {n: int(v) for n, v in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    assert constants == {"kMaxThreads": rope.MAX_THREADS, "kPairs": rope.PAIRS}


@pytest.mark.parametrize(
    ("heads", "head_dim", "threads"),
    [(1, 64, 32), (3, 64, 32), (9, 64, 96), (48, 64, 256), (5, 128, 96)],
)
def test_block_threads(heads, head_dim, threads):
    assert rope.block_threads(heads, head_dim) == threads


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (9, 64), (40, 64), (5, 128)])
def test_rope_kernel(device, heads, head_dim, act):
    x = np.random.default_rng(0).standard_normal((len(POSITIONS), heads * head_dim), np.float32)
    program = rope_program(heads, head_dim)
    arrays = {"x": x, "positions": np.array(POSITIONS, np.int32)}
    check_cuda(device, program, program, {"T": len(x)}, arrays, act, {"T": len(x) + 3})


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_kv_write_kernel(device, block_size):
    dims, arrays, _ = problem(3, 64, block_size)
    with_padding(arrays)
    k, v = np.random.default_rng(1).standard_normal((2, len(POSITIONS), 3 * 64), np.float32)
    arrays |= {"k": DType.BF16.round(k), "v": DType.BF16.round(v)}
    program = kv_write_program(3, 64, block_size)
    want = run_numpy(program, dims, arrays)["kv_cache"]
    np.testing.assert_array_equal(run_cuda(device, program, dims, arrays)["kv_cache"], want)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (9, 3, 64, 16),
        (32, 8, 64, 8),
        (4, 1, 128, 64),
        (3, 3, 64, 32),
    ],
)
def test_fused_kernel(device, heads, kv_heads, head_dim, block_size, act):
    dims, arrays, _ = problem(kv_heads, head_dim, block_size)
    with_padding(arrays)
    program = layer_program(heads, kv_heads, head_dim, block_size, 64)
    lowered = lower(program, "decode")  # without attention, it stays as it is
    assert "rope_kv_write" in [op.kind for op in lowered.ops]
    rng = np.random.default_rng(1)
    arrays["x"] = act.round(rng.standard_normal((dims["T"], 64), np.float32))
    for w in program.weights.values():
        arrays[w.name] = act.round(rng.standard_normal(w.shape, np.float32) / 8)
    actual = check_cuda(device, program, lowered, dims, arrays, act)
    reference = run_numpy(program, dims, arrays)["kv_cache"]
    twin = run_numpy(program, dims, arrays, round_to=act)["kv_cache"]
    written = ~np.isnan(reference)  # exactly these may change
    np.testing.assert_array_equal(np.isnan(actual["kv_cache"]), ~written)
    assert_close_to_twin(actual["kv_cache"][written], reference[written], twin[written], act)
