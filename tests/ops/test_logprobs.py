"""Log-probabilities, ranks and the best tokens against float64 and a full sort."""

import numpy as np
import pytest
from harness import run_cuda, run_numpy

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


def program(V: int) -> Program:
    p = Program("t")
    p.buffer("logits", ("S", V), DType.F32, INPUT)
    p.buffer("targets", ("S",), DType.I32, INPUT)
    p.buffer("target_logprob", ("S",), DType.F32, OUTPUT)
    p.buffer("target_rank", ("S",), DType.I32, OUTPUT)
    p.buffer("top_ids", ("S", "P"), DType.I32, OUTPUT)
    p.buffer("top_logprobs", ("S", "P"), DType.F32, OUTPUT)
    op = op_def("logprobs")
    p.emit("logprobs", **{n: n for n in (*op.reads, *op.writes)})
    return p


def inputs(S: int, V: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(S * V)
    logits = rng.standard_normal((S, V), np.float32) * 4
    logits[::2] = np.round(logits[::2] * 2) / 2  # many equal ones
    if V > 4:
        logits[-1, [1, 3]] = -np.inf, np.nan
    return {"logits": logits, "targets": rng.integers(0, V, S).astype(np.int32)}


def check(out: dict[str, np.ndarray], arrays: dict[str, np.ndarray], P: int) -> None:
    x = arrays["logits"].astype(np.float64)
    x[np.isnan(x)] = -np.inf
    top = x.max(axis=1, keepdims=True)
    exact = x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))
    rows, targets = np.arange(len(x)), arrays["targets"]
    order = np.argsort(-x, axis=1, kind="stable")[:, :P]
    np.testing.assert_array_equal(out["top_ids"], order)
    np.testing.assert_array_equal(
        out["target_rank"], (x > x[rows, targets][:, None]).sum(axis=1) + 1
    )
    np.testing.assert_allclose(out["target_logprob"], exact[rows, targets], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        out["top_logprobs"], np.take_along_axis(exact, order, 1), rtol=2e-6, atol=2e-6
    )


SIZES = [(1, 1, 1), (3, 7, 7), (2, 301, 20), (3, 49153, 20)]


@pytest.mark.parametrize(("S", "V", "P"), SIZES)
def test_reference(S, V, P):
    arrays = inputs(S, V)
    check(run_numpy(program(V), {"S": S, "P": P}, arrays), arrays, P)


def test_close_logits_are_ordered_by_the_logits_themselves():
    logits = np.zeros((1, 64), np.float32)
    logits[0, 40] = np.float32(2.0**-40)  # vanishes when the maximum's log-sum is subtracted
    arrays = {"logits": logits, "targets": np.array([0], np.int32)}
    out = run_numpy(program(64), {"S": 1, "P": 3}, arrays)
    assert out["top_ids"].tolist() == [[40, 0, 1]] and out["target_rank"].tolist() == [2]


def test_launches():
    def launches(S, V, P):
        row, best = DeviceArray(0, (S,), DType.I32), DeviceArray(0, (S, P), DType.I32)
        a = Operands(
            logits=DeviceArray(0, (S, V), DType.F32),
            targets=row,
            target_logprob=row,
            target_rank=row,
            top_ids=best,
            top_logprobs=best,
        )
        return op_def("logprobs").launches(a, None)

    assert launches(0, 100, 5) == []
    (launch,) = launches(9, 100, 5)
    assert launch.grid == (9, 1, 1) and launch.spec.template_args == ("true",)
    with pytest.raises(AssertionError, match="20 best of 19"):
        launches(1, 19, 20)


@pytest.mark.gpu
@pytest.mark.parametrize(("S", "V", "P"), [*SIZES, (2, 128256, 5), (140, 4097, 3), (2, 20, 20)])
def test_kernel(device, S, V, P):
    arrays = inputs(S, V)
    dims = {"S": S, "P": P}
    out = run_cuda(device, program(V), dims, arrays, limits={"S": S + 2})
    check(out, arrays, P)
    again = run_cuda(device, program(V), dims, arrays)
    for name, values in out.items():
        np.testing.assert_array_equal(values, again[name], err_msg=name)
