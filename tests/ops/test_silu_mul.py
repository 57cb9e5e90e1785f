"""The gated activation, also on column views."""

import numpy as np
import pytest
from harness import check_cuda, run_numpy

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, Buffer, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType


def program(columns: int, gap: int = 0) -> Program:
    """gate and up are columns of one buffer, `gap` unused ones between them."""
    p = Program("t")
    p.buffer("both", ("T", 2 * columns + gap), kind=INPUT)
    p.buffers["gate"] = Buffer("gate", ("T", columns), None, parent="both", column=0)
    p.buffers["up"] = Buffer("up", ("T", columns), None, parent="both", column=columns + gap)
    p.emit("silu_mul", "y", gate="gate", up="up", out_kind=OUTPUT)
    return p


def inputs(T: int, columns: int, gap: int = 0) -> dict[str, np.ndarray]:
    both = np.random.default_rng(T * columns).standard_normal((T, 2 * columns + gap), np.float32)
    both[:, :columns] *= 4
    both[:, columns : columns + gap] = np.nan
    both[0, 0], both[-1, columns - 1] = -200, 200  # exp overflows, exp vanishes
    return {"both": both}


def test_reference():
    both = inputs(3, 5)["both"]
    out = run_numpy(program(5), {"T": 3}, {"both": both})
    gate, up = np.split(both.astype(np.float64), 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(out["y"], exact, rtol=1e-6, atol=1e-30)


def test_launch_covers_wide_rows_and_skips_empty_ones():
    def launches(T: int, columns: int):
        both = DeviceArray(0, (T, 2 * columns), DType.BF16)
        a = Operands(
            y=DeviceArray(0, (T, columns), DType.BF16),
            act=DType.BF16,
            gate=both.columns(0, columns),
            up=both.columns(columns, columns),
        )
        return op_def("silu_mul").launches(a, None)

    assert launches(0, 64) == []
    (launch,) = launches(100_000, 8192)  # more rows than a grid's second axis may have
    assert launch.grid == (100_000, 4, 1) and launch.block == 256


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("T", "columns", "gap"), [(1, 1, 0), (3, 7, 2), (17, 1536, 8), (5, 1536, 3), (2, 8192, 0)]
)
def test_kernel(device, act, T, columns, gap):
    p = program(columns, gap)
    check_cuda(device, p, p, {"T": T}, inputs(T, columns, gap), act, {"T": T + 2})
