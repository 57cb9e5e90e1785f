"""RoPE, KV write and attention in one kernel: against its parts, to the bit, at awkward lengths."""

import numpy as np
import pytest
from harness import assert_close_to_twin, check_cuda, run_cuda, run_numpy
from paged import GROUP, LAYER, LAYERS, cache_dims, paged_cache

from tinyvllm.ops import attention
from tinyvllm.ops.lower import (
    RULES,
    fuse_rope_attention,
    fuse_rope_kv_write,
    lower,
    merge_qkv,
)
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.util import DType, ceil_div

HIDDEN = 64
LENGTHS = [1, 7, 0, 16, 17, 33, 200, 256, 257, 1025]  # with the new token; 0: padding


def layer_program(heads, kv_heads, head_dim, block_size):
    """Products of q, k and v, and everything up to the attention's output."""
    p = Program("test")
    i32 = DType.I32
    p.buffer("kv_cache", ("NB", LAYERS, 2, kv_heads, block_size, head_dim), kind=STATE)
    p.buffer("block_tables", (2, "SLOTS", "MB"), i32, STATE)
    for name, dim in (
        ("query_start", "R1"),
        ("batch_slots", "R"),
        ("seq_lens", "R"),
        ("positions", "T"),
        ("token_slots", "T"),
    ):
        p.buffer(name, (dim,), i32, INPUT)
    x = p.buffer("x", ("T", HIDDEN), kind=INPUT)
    freq = p.constant("freq", (10000.0 ** -np.linspace(0, 1, head_dim // 2)).astype(np.float32))
    q, k, v = (
        p.emit("matmul", n, x=x, weight=p.weight(f"{n}.weight", h * head_dim, HIDDEN), bias=None)
        for n, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    rope = {"positions": "positions", "inv_freq": freq, "head_dim": head_dim}
    q, k = p.emit("rope", "q_roped", x=q, **rope), p.emit("rope", "k_roped", x=k, **rope)
    cache = {"kv_cache": "kv_cache", "block_tables": "block_tables", "layer": LAYER, "group": GROUP}
    p.emit("kv_write", k=k, v=v, positions="positions", token_slots="token_slots", **cache)
    rows = {name: name for name in ("query_start", "batch_slots", "seq_lens")}
    p.emit("attention", "y", q=q, **cache, **rows, scale=head_dim**-0.5, out_kind=OUTPUT)
    return p


def problem(p, kv_heads, head_dim, block_size, lengths=LENGTHS):
    """dims and arrays for rows of these contexts, of which the last token is not in the cache."""
    rng = np.random.default_rng(0)
    before = [max(length - 1, 0) for length in lengths]
    paged = paged_cache(rng, lengths, before, kv_heads, head_dim, block_size)
    seq_lens, slots = np.array(lengths, np.int32), paged["batch_slots"]
    slots[seq_lens == 0] = -1
    rows = len(lengths)
    dims = {"T": rows, "R": rows, "R1": rows + 1, "D": rows, "Q": 0, "C": max(lengths) + 3}
    dims |= cache_dims(paged)
    arrays = {
        **paged,
        "query_start": np.arange(rows + 1, dtype=np.int32),
        "token_slots": slots,
        "seq_lens": seq_lens,
        "positions": np.maximum(seq_lens - 1, 0),
        "x": rng.standard_normal((rows, HIDDEN), np.float32),
    }
    for w in p.weights.values():
        arrays[w.name] = rng.standard_normal(w.shape, np.float32) / 4
    return dims, arrays


def fused(program):
    lowered = lower(program, "decode")
    assert [op.kind for op in lowered.ops] == ["matmul", "rope_attention"]
    return lowered


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 8), (128, 16)])
def test_reference_is_that_of_the_parts(head_dim, block_size):
    program = layer_program(6, 2, head_dim, block_size)
    dims, arrays = problem(program, 2, head_dim, block_size)
    want, have = (run_numpy(p, dims, arrays) for p in (program, fused(program)))
    for name in ("y", "kv_cache"):
        np.testing.assert_allclose(have[name], want[name], atol=1e-5)


def test_attention_of_other_queries_or_another_layer_is_not_fused(monkeypatch):
    rules = [merge_qkv, fuse_rope_kv_write, fuse_rope_attention]
    monkeypatch.setitem(RULES, "test", rules)
    program = layer_program(4, 2, 64, 16)
    assert [op.kind for op in lower(program, "test").ops] == ["matmul", "rope_attention"]
    program.ops[-1].attrs["layer"] = 0
    unfused = ["matmul", "rope_kv_write", "attention"]
    assert [op.kind for op in lower(program, "test").ops] == unfused
    program = layer_program(4, 2, 64, 16)
    program.emit("add", "z", a="q_roped", b="q_roped", out_kind=OUTPUT)
    assert [op.kind for op in lower(program, "test").ops] == [*unfused, "add"]


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "block_size"),
    [
        (1, 2, 64, 8),
        (3, 3, 64, 16),
        (4, 2, 64, 32),
        (8, 1, 128, 64),
        (11, 1, 128, 16),
        (4, 2, 128, 8),
        (5, 1, 64, 64),
    ],
)
def test_kernel(device, group, kv_heads, head_dim, block_size, act):
    program = layer_program(group * kv_heads, kv_heads, head_dim, block_size)
    dims, arrays = problem(program, kv_heads, head_dim, block_size)
    actual = check_cuda(device, program, fused(program), dims, arrays, act, {"T": len(LENGTHS) + 2})
    rounded = {n: a if a.dtype == np.int32 else act.round(a) for n, a in arrays.items()}
    reference = run_numpy(program, dims, rounded)["kv_cache"]
    twin = run_numpy(program, dims, rounded, round_to=act)["kv_cache"]
    written = ~np.isnan(reference)  # exactly these may change
    np.testing.assert_array_equal(np.isnan(actual["kv_cache"]), ~written)
    assert_close_to_twin(actual["kv_cache"][written], reference[written], twin[written], act)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [4, 11])
def test_kernel_equals_its_parts_to_the_bit(device, monkeypatch, group, head_dim):
    program = layer_program(2 * group, 2, head_dim, 16)
    dims, arrays = problem(program, 2, head_dim, 16, [*LENGTHS, 4099])
    monkeypatch.setitem(RULES, "parts", [merge_qkv, fuse_rope_kv_write])
    want = run_cuda(device, lower(program, "parts"), dims, arrays)
    partitions = attention.max_partitions(dims["C"])
    pairs = dims["R"] * 2 * ceil_div(group, 8)
    for divided, stages in (
        (None, None),
        ((pairs, 0), 1),
        ((pairs, 0), 2),
        ((1, partitions), 2),
        ((20, partitions), 2),
    ):
        if divided:
            monkeypatch.setattr(attention, "decode_blocks", lambda *_, d=divided: d)
            monkeypatch.setattr(attention, "decode_stages", lambda *_, s=stages: s)
        have = run_cuda(device, fused(program), dims, arrays)
        for name in ("y", "kv_cache"):
            np.testing.assert_array_equal(have[name], want[name])
