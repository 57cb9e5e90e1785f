"""The residual add."""

import numpy as np
import pytest
from harness import check_cuda, run_numpy

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Cost, Operands
from tinyvllm.ops.program import INPUT, OUTPUT, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


def program(K: int) -> Program:
    p = Program("t")
    p.buffer("a", ("T", K), kind=INPUT)
    p.buffer("b", ("T", K), kind=INPUT)
    p.emit("add", "y", a="a", b="b", out_kind=OUTPUT)
    return p


def inputs(T: int, K: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(T * K)
    return {n: rng.standard_normal((T, K), np.float32) for n in "ab"}


def test_reference():
    arrays = inputs(3, 5)
    out = run_numpy(program(5), {"T": 3}, arrays)
    exact = arrays["a"].astype(np.float64) + arrays["b"]
    np.testing.assert_allclose(out["y"], exact, rtol=1e-6, atol=1e-7)


def test_cost_and_empty_launch():
    array = DeviceArray(0, (0, 64), DType.BF16)
    assert op_def("add").launches(Operands(a=array, b=array, y=array, act=DType.BF16), None) == []
    array = DeviceArray(0, (2, 64), DType.BF16)
    assert op_def("add").cost(Operands(a=array, b=array, y=array)) == Cost(3 * 2 * 64 * 2, 2 * 64)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(("T", "K"), [(1, 7), (17, 576), (3, 577), (300, 2048)])
def test_kernel_rounds_the_float32_sum(device, act, T, K):
    p, arrays = program(K), inputs(T, K)
    out = check_cuda(device, p, p, {"T": T}, arrays, act, {"T": T + 2})
    rounded = act.round(arrays["a"]) + act.round(arrays["b"])
    np.testing.assert_array_equal(out["y"], act.round(rounded))
