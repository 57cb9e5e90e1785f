"""RMSNorm: reference, launches, kernel."""

import numpy as np
import pytest
from harness import check_cuda, run_cuda, run_numpy

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType, InputError

EPS = 1e-5


def program(K: int) -> Program:
    p = Program("t")
    p.buffer("x", ("T", K), kind=INPUT)
    p.weight("weight", K)
    p.emit("rms_norm", "y", x="x", weight="weight", eps=EPS, out_kind=OUTPUT)
    return p


def inputs(T: int, K: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(T * K)
    x = rng.standard_normal((T, K), np.float32)
    x[0] *= 1e-3  # eps matters
    return {"x": x, "weight": rng.standard_normal(K, np.float32) + 1}


def test_reference():
    arrays = inputs(3, 577)
    out = run_numpy(program(577), {"T": 3}, arrays)
    x = arrays["x"].astype(np.float64)
    exact = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * arrays["weight"]
    np.testing.assert_allclose(out["y"], exact, rtol=2e-6, atol=1e-6)


def launches(T: int, K: int):
    x = DeviceArray(0, (T, K), DType.BF16)
    weight = DeviceArray(0, (K,), DType.BF16)
    a = Operands(x=x, weight=weight, y=x, eps=EPS, act=DType.BF16)
    return op_def("rms_norm").launches(a, None)


@pytest.mark.parametrize("K", [1, 7, 64, 576, 577, 2048, 8191, 8192, 8200, 16384])
def test_threads_hold_the_whole_row_and_follow_from_k_alone(K):
    (launch,) = launches(3, K)
    _, vec, iters = launch.spec.template_args
    assert launch.grid == (3, 1, 1)
    assert launch.block % 32 == 0 and launch.block <= 1024
    assert launch.block * int(vec) * int(iters) >= K and K % int(vec) == 0
    assert launches(500, K)[0].block == launch.block
    assert launches(0, K) == []


def test_too_long_rows_are_refused():
    with pytest.raises(InputError, match=r"8193 elements: at most 8192"):
        launches(1, 8193)
    with pytest.raises(InputError, match=r"16392 elements: at most 16384"):
        launches(1, 16392)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("T", "K"),
    [(1, 7), (17, 576), (2, 577), (5, 2048), (3, 4099), (2, 9000), (1, 8191), (2, 16384)],
)
def test_kernel(device, act, T, K):
    p, arrays = program(K), inputs(T, K)
    check_cuda(device, p, p, {"T": T}, arrays, act, {"T": T + 2})


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others(device):
    p, arrays = program(576), inputs(33, 576)
    together = run_cuda(device, p, {"T": 33}, arrays)
    alone = run_cuda(device, p, {"T": 1}, {**arrays, "x": arrays["x"][7:8]})
    np.testing.assert_array_equal(alone["y"][0], together["y"][7])
