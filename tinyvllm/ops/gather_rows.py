"""Ops that copy rows by index: the embedding of token ids, and the choice of a batch's rows."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.arrays import nbytes, vector_width
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.util import DType, align_up

GATHER_ROWS = Kernel(
    "gather_rows.cu", "gather_rows_kernel", "ptr source, ptr index, ptr y, i32 K", pdl=True
)
MAX_THREADS = 256


class Embedding(OpDef):
    """y[t] = weight[token_ids[t]]. The engine has checked that the ids are in range."""

    name = "embedding"
    reads = {"token_ids": ("T",), "weight": ("V", "K")}
    writes = {"y": ("T", "K")}

    def reference(self, a: Operands) -> None:
        _gather(a.weight, a.token_ids, a.y)

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return _launches(a.act, a.weight, a.token_ids, a.y)

    def cost(self, a: Operands) -> Cost:
        return Cost(nbytes(a.token_ids, a.y, a.y))  # each row is read and written


class SelectRows(OpDef):
    """y[s] = x[index[s]]."""

    name = "select_rows"
    reads = {"x": ("T", "K"), "index": ("S",)}
    writes = {"y": ("S", "K")}

    def reference(self, a: Operands) -> None:
        _gather(a.x, a.index, a.y)

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return _launches(a.act, a.x, a.index, a.y)

    def cost(self, a: Operands) -> Cost:
        return Cost(nbytes(a.index, a.y, a.y))


def _gather(source: np.ndarray, index: np.ndarray, y: np.ndarray) -> None:
    assert index.size == 0 or (index.min() >= 0 and index.max() < len(source)), index
    np.take(source, index, axis=0, out=y, mode="clip")  # "raise" would copy through a buffer


def _launches(act: DType, source: DeviceArray, index: DeviceArray, y: DeviceArray) -> list[Launch]:
    assert source.contiguous and y.contiguous
    rows, K = y.shape
    if rows == 0:
        return []
    vec = vector_width(K, source, y)
    threads = min(MAX_THREADS, align_up(K // vec, 32))
    return [
        GATHER_ROWS(act, vec).launch(
            (rows,), threads, source=source.ptr, index=index.ptr, y=y.ptr, K=K
        )
    ]
