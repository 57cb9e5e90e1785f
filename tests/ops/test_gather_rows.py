"""Rows copied by index: embedding and select_rows."""

import numpy as np
import pytest
from harness import check_cuda, run_numpy

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


def embed_then_select(V: int, K: int) -> Program:
    p = Program("t")
    p.buffer("ids", ("T",), DType.I32, INPUT)
    p.buffer("index", ("S",), DType.I32, INPUT)
    p.weight("table", V, K)
    p.emit("embedding", "x", token_ids="ids", weight="table", out_kind=OUTPUT)
    p.emit("select_rows", "y", x="x", index="index", out_kind=OUTPUT)
    return p


def inputs(T: int, S: int, V: int, K: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(T * K)
    ids = rng.integers(0, V, T).astype(np.int32)
    ids[0], ids[-1] = V - 1, 0
    return {
        "ids": ids,
        "index": rng.integers(0, T, S).astype(np.int32),
        "table": rng.standard_normal((V, K), np.float32),
    }


def test_reference_copies_rows():
    arrays = inputs(5, 3, 11, 7)
    out = run_numpy(embed_then_select(11, 7), {"T": 5, "S": 3}, arrays)
    for t in range(5):
        assert (out["x"][t] == arrays["table"][arrays["ids"][t]]).all()
    for s in range(3):
        assert (out["y"][s] == out["x"][arrays["index"][s]]).all()


def test_reference_refuses_an_index_out_of_range():
    a = Operands(
        x=np.zeros((2, 3), np.float32),
        index=np.array([2], np.int32),
        y=np.zeros((1, 3), np.float32),
    )
    with pytest.raises(AssertionError):
        op_def("select_rows").reference(a)


def test_nothing_is_launched_for_no_rows():
    a = Operands(
        x=DeviceArray(0, (4, 64), DType.BF16),
        index=DeviceArray(0, (0,), DType.I32),
        y=DeviceArray(0, (0, 64), DType.BF16),
        act=DType.BF16,
    )
    assert op_def("select_rows").launches(a, None) == []


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("T", "S", "V", "K"), [(1, 1, 3, 576), (17, 7, 49153, 64), (9, 2, 5, 7), (3, 3, 100, 4104)]
)
def test_kernel_copies_exactly(device, act, T, S, V, K):
    p = embed_then_select(V, K)
    arrays = inputs(T, S, V, K)
    out = check_cuda(device, p, p, {"T": T, "S": S}, arrays, act, {"T": T + 3, "S": S + 3})
    np.testing.assert_array_equal(out["x"], act.round(arrays["table"])[arrays["ids"]])
    np.testing.assert_array_equal(out["y"], out["x"][arrays["index"]])
