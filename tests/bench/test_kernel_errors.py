"""Errors of kernels against references: what counts as right, and what does not."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "ops"))
import test_rope_attention as layer
from harness import pack, run_numpy
from test_matmul_sample import head_case, head_program
from test_norm_matmul import normed_product, random_arrays

from tinyvllm.bench.kernel_errors import reference_errors, unpacked
from tinyvllm.ops.lower import RULES, fuse_norm, fuse_silu_mul, lower
from tinyvllm.ops.program import Weight
from tinyvllm.util import DType


@pytest.mark.parametrize("interleave", [0, 8])
def test_unpacked_weights_are_the_parts(interleave):
    rng = np.random.default_rng(0)
    heights = [16, 16, 16] if interleave else [24, 8, 16]
    parts = {n: rng.standard_normal((h, 5)) for n, h in zip("abc", heights, strict=True)}
    weight = Weight("a+b+c", (48, 5), tuple("abc"), interleave)
    found = unpacked(weight, pack(weight, parts), heights)
    assert list(found) == list("abc")
    for name, part in parts.items():
        np.testing.assert_array_equal(found[name], part)


@pytest.mark.parametrize(("wrong", "ok"), [(0.0, True), (0.5, False)])
def test_errors_of_an_op_against_its_reference(wrong, ok):
    plain = layer.layer_program(6, 2, 64, 8)
    program = layer.fused(plain)
    dims, arrays = layer.problem(plain, 2, 64, 8, lengths=[5, 17, 0, 40])
    arrays["kv_cache"] = np.nan_to_num(arrays["kv_cache"])
    done = run_numpy(program, dims, arrays)
    product, attention = program.ops
    weight = program.weights[product.operands["weight"]]
    packed = pack(weight, arrays)
    joint = arrays["x"] @ packed.T
    after = {product.operands["y"]: joint + wrong}
    before = arrays | {weight.name: packed}
    (error,) = reference_errors(program, product, dims, before, after, DType.BF16)
    assert (error.output, error.ok) == (product.operands["y"], ok)
    assert error.error == pytest.approx(wrong, abs=1e-4) and error.rounded > 0
    before = arrays | {product.operands["y"]: joint, "freq": program.constants["freq"]}
    after = {"y": done["y"] + wrong, "kv_cache": done["kv_cache"]}
    errors = reference_errors(program, attention, dims, before, after, DType.BF16)
    assert {e.output: e.ok for e in errors} == {"y": ok, "kv_cache": True}


def test_errors_of_a_product_with_a_norm(monkeypatch):
    monkeypatch.setitem(RULES, "test", [fuse_silu_mul, fuse_norm])
    plain = normed_product(24, 40, silu=True)
    program, arrays = lower(plain, "test"), random_arrays(plain, 5)
    (op,) = program.ops
    weight = program.weights[op.operands["weight"]]
    before = arrays | {weight.name: pack(weight, arrays)}
    for wrong in (0.0, 0.5):
        after = {"y": run_numpy(plain, {"T": 5}, arrays)["y"] + wrong}
        (error,) = reference_errors(program, op, {"T": 5}, before, after, DType.BF16)
        assert error.ok == (wrong == 0)


@pytest.mark.parametrize("norm", [False, True])
def test_errors_of_tokens_are_those_of_their_logits(norm):
    """Whichever of two tokens with hardly different logits is taken: both are right."""
    program = lower(head_program(300, 24, norm=norm), "decode")
    dims, arrays = head_case(7, 300, 24, [0.0])
    arrays["w"][200] = arrays["w"][100] = np.sign(arrays["x"][3])  # the best of one row
    for third, ok in ((200, True), (100, True), (5, False)):
        tokens = run_numpy(program, dims, arrays)["tokens"]
        assert tokens[3] == 100
        tokens[3] = third
        after = {"tokens": tokens}
        (op,) = program.ops
        (error,) = reference_errors(program, op, dims, arrays, after, DType.BF16)
        assert (error.output, error.ok) == ("tokens", ok)
        assert (error.error == 0) == ok and error.scale > 5
