"""The product with RoPE and KV write: when it is one kernel, and that this changes no bit."""

import itertools

import numpy as np
import pytest
from harness import assert_close_to_twin, check_cuda, run_cuda, run_numpy
from test_rope import layer_program, problem, with_padding

from tinyvllm.driver.devices import DEVICES
from tinyvllm.ops.executor import described, plan_program
from tinyvllm.ops.lower import RULES, fuse_qkv, fuse_rope_kv_write, lower, merge_qkv
from tinyvllm.ops.matmul_kernels import MATMUL_HOPPER, MATMUL_ROPE_KV_WRITE, MATMUL_WIDE
from tinyvllm.ops.program import OUTPUT
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

H200, A100 = DEVICES["sm_90a"], DEVICES["sm_80"]
KIND = "matmul_rope_kv_write"


@pytest.fixture
def unfused(monkeypatch):
    """Lowers a program by the rules before the last."""
    monkeypatch.setitem(RULES, "test", [merge_qkv, fuse_rope_kv_write])
    return lambda program: lower(program, "test")


def random_step(program, tokens, kv_heads, head_dim, block_size, act=DType.BF16, seed=1):
    """Sizes and arrays: tokens at places of a few sequences, each place once."""
    rng = np.random.default_rng(seed)
    positions = rng.permutation(6 * tokens)[:tokens].tolist()
    dims, arrays, _ = problem(kv_heads, head_dim, block_size, positions, seed)
    arrays["token_slots"][rng.permutation(tokens)[: tokens // 7]] = -1
    hidden = program.buffers["x"].shape[1]
    arrays["x"] = act.round(rng.standard_normal((tokens, hidden), np.float32))
    for w in program.weights.values():
        scale = np.float32(1 if len(w.shape) == 1 else hidden**-0.5)
        arrays[w.name] = act.round(rng.standard_normal(w.shape, np.float32) * scale)
    return dims, arrays


def test_the_reference_is_that_of_the_parts():
    program = layer_program(4, 2, 64, 16, 40)
    lowered = lower(program, "prefill")
    assert [op.kind for op in lowered.ops] == [KIND]
    assert [part.kind for part in lowered.ops[0].parts] == ["matmul"] * 3 + ["rope"] * 2 + [
        "kv_write"
    ]
    assert not {"q", "k", "v", "k_roped"} & set(lowered.buffers), "they exist only inside the op"
    dims, arrays = random_step(program, 9, 2, 64, 16)
    want, have = (run_numpy(p, dims, arrays) for p in (program, lowered))
    for name in want:
        np.testing.assert_allclose(have[name], want[name], atol=1e-5, err_msg=name)


def test_a_product_that_is_read_again_stays_apart(monkeypatch):
    monkeypatch.setitem(RULES, "test", [merge_qkv, fuse_rope_kv_write, fuse_qkv])
    program = layer_program(4, 2, 64, 16, 40)
    program.emit("add", "again", a="v", b="v", out_kind=OUTPUT)
    assert [op.kind for op in lower(program, "test").ops] == ["matmul", "rope_kv_write", "add"]


def launches(tokens, device, head_dim=64, heads=32, kv_heads=8, act=DType.BF16):
    program = lower(layer_program(heads, kv_heads, head_dim, 16, 2048), "prefill")
    dims = {"T": tokens, "NB": 9, "SLOTS": 4, "MB": 8}
    return op_def(KIND).launches(described(program, program.ops[0], dims, act), device)


@pytest.mark.parametrize(
    ("tokens", "head_dim"),
    [(33, 64), (65, 64), (65, 128), *itertools.product([129, 200, 300, 1025, 8192], [64, 128])],
)
def test_one_kernel_on_hopper_with_whole_heads_in_a_tile(tokens, head_dim):
    (one,) = launches(tokens, H200, head_dim)
    assert one.spec.kernel is MATMUL_ROPE_KV_WRITE
    cols, its_head_dim = int(one.spec.template_args[3]), int(one.spec.template_args[-1])
    assert its_head_dim == head_dim and cols % head_dim == 0


def test_two_kernels_elsewhere():
    """Few tokens, heads of other sizes, and other devices."""
    product, rest = launches(32, H200)
    assert product.spec.kernel is MATMUL_WIDE and rest.spec.kernel.entry == "rope_kv_write_kernel"
    assert launches(64, H200, 128)[0].spec.kernel is MATMUL_HOPPER
    assert launches(300, H200, 96)[0].spec.kernel is MATMUL_HOPPER
    assert [one.spec.kernel.file for one in launches(300, A100)] == ["matmul_large.cu", "rope.cu"]


@pytest.mark.parametrize(
    ("device", "head_dim", "rows"), [(H200, 64, 32), (H200, 96, 77), (A100, 64, 77)]
)
def test_scratch_is_planned_for_what_takes_two_kernels(device, head_dim, rows):
    program = lower(layer_program(4, 2, head_dim, 16, 64), "prefill")
    limits = {"T": 77, "NB": 9, "SLOTS": 4, "MB": 8}
    plan = plan_program(program, limits, DType.BF16, device)
    q = 77 * 4 * head_dim * 2
    scratch = rows * 8 * head_dim * 2
    assert q + scratch <= plan.arena_bytes <= q + scratch + 512


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "hidden", "bias"),
    [
        (9, 3, 64, 16, 576, False),
        (32, 8, 64, 8, 72, True),
        (5, 1, 128, 64, 2048, True),
        (3, 3, 64, 32, 8, False),
        (7, 1, 96, 16, 40, False),
    ],
)
def test_kernel(device, heads, kv_heads, head_dim, block_size, hidden, bias, act):
    program = layer_program(heads, kv_heads, head_dim, block_size, hidden, bias=bias)
    lowered = lower(program, "prefill")
    for tokens in (1, 7, 33, 64, 65, 130, 200, 257, 400):
        dims, arrays = random_step(program, tokens, kv_heads, head_dim, block_size, act, tokens)
        limits = {**dims, "T": tokens + 3}
        actual = check_cuda(device, program, lowered, dims, arrays, act, limits)
        reference = run_numpy(program, dims, arrays)["kv_cache"]
        twin = run_numpy(program, dims, arrays, round_to=act)["kv_cache"]
        written = ~np.isnan(reference)  # exactly these may change
        np.testing.assert_array_equal(np.isnan(actual["kv_cache"]), ~written)
        assert_close_to_twin(actual["kv_cache"][written], reference[written], twin[written], act)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_kernel_gives_the_bits_of_two(device, unfused, head_dim):
    program = layer_program(12, 4, head_dim, 16, 1032)
    for tokens in (300, 400, 700, 2100, 4100):
        dims, arrays = random_step(program, tokens, 4, head_dim, 16)
        one = run_cuda(device, lower(program, "prefill"), dims, arrays)
        two = run_cuda(device, unfused(program), dims, arrays)
        for name, values in two.items():
            np.testing.assert_array_equal(one[name], values, err_msg=f"{name} of {tokens}")


@pytest.mark.gpu
def test_longest_positions(device):
    program = layer_program(9, 3, 64, 16, 64)
    dims, arrays, _ = problem(3, 64, 16, [*range(0, 131072, 3001), 131071])
    with_padding(arrays)
    rng = np.random.default_rng(1)
    arrays["x"] = DType.BF16.round(rng.standard_normal((dims["T"], 64), np.float32))
    for w in program.weights.values():
        arrays[w.name] = DType.BF16.round(rng.standard_normal(w.shape, np.float32) / 8)
    check_cuda(device, program, lower(program, "prefill"), dims, arrays)
