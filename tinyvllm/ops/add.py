"""The residual add: y = a + b."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes, vector_width
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.util import ceil_div

ADD = Kernel("add.cu", "add_kernel", "ptr a, ptr b, ptr y, i64 count", pdl=True)
THREADS = 256


class Add(OpDef):
    """y = a + b."""

    name = "add"
    reads = {"a": ("T", "K"), "b": ("T", "K")}
    writes = {"y": ("T", "K")}

    def reference(self, a: Operands) -> None:
        np.add(a.a, a.b, out=a.y)

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        assert a.a.contiguous and a.b.contiguous and a.y.contiguous
        T, K = a.y.shape
        if T == 0:
            return []
        vec = vector_width(K, a.a, a.b, a.y)
        return [
            ADD(a.act, vec).launch(
                (ceil_div(T * K, vec * THREADS),),
                THREADS,
                a=a.a.ptr,
                b=a.b.ptr,
                y=a.y.ptr,
                count=T * K,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        T, K = a.y.shape
        return Cost(nbytes(a.a, a.b, a.y), T * K)
