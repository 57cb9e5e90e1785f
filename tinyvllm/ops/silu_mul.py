"""The gated activation of the MLP: y = silu(gate) * up."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes, vector_width
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.util import ceil_div

SILU_MUL = Kernel(
    "silu_mul.cu",
    "silu_mul_kernel",
    "ptr gate, ptr up, ptr y, i32 I, i32 gate_stride, i32 up_stride",
    pdl=True,
)
THREADS = 256


class SiluMul(OpDef):
    """y = silu(gate) * up, silu(x) = x / (1 + exp(-x)); gate and up may be column views."""

    name = "silu_mul"
    reads = {"gate": ("T", "I"), "up": ("T", "I")}
    writes = {"y": ("T", "I")}

    def reference(self, a: Operands) -> None:
        with np.errstate(over="ignore"):  # exp(-gate) = infinity gives -0, as it should
            divisor = np.exp(-a.gate)
        divisor += 1
        np.divide(a.gate, divisor, out=divisor)
        np.multiply(divisor, a.up, out=a.y)

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        assert a.y.contiguous
        T, columns = a.y.shape
        if T == 0:
            return []
        vec = vector_width(columns, a.gate, a.up, a.y)
        return [
            SILU_MUL(a.act, vec).launch(
                (T, ceil_div(columns, vec * THREADS)),
                THREADS,
                gate=a.gate.ptr,
                up=a.up.ptr,
                y=a.y.ptr,
                I=columns,
                gate_stride=a.gate.row_stride,
                up_stride=a.up.row_stride,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        T, columns = a.y.shape
        return Cost(nbytes(a.gate, a.up, a.y), 5 * T * columns)
