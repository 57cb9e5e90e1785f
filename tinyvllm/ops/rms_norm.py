"""RMSNorm over the rows of a buffer."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.arrays import nbytes, vector_width
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.util import InputError, align_up, ceil_div

RMS_NORM = Kernel(
    "rms_norm.cu", "rms_norm_kernel", "ptr x, ptr weight, ptr y, i32 K, f32 eps", pdl=True
)
MAX_THREADS = 1024
# A row stays in the registers of one block: the longest rows by elements a vector.
MAX_K = {8: 16384, 1: 8192}


class RmsNorm(OpDef):
    """y = x * rsqrt(mean(x^2) + eps) * weight, the mean over a row."""

    name = "rms_norm"
    reads = {"x": ("T", "K"), "weight": ("K",)}
    writes = {"y": ("T", "K")}
    attrs = frozenset({"eps"})

    def reference(self, a: Operands) -> None:
        scale = np.mean(np.square(a.x), axis=-1, keepdims=True)
        scale += np.float32(a.eps)
        np.sqrt(scale, out=scale)
        np.divide(a.x, scale, out=a.y)
        np.multiply(a.y, a.weight, out=a.y)

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return norm_launches(a.x, a.weight, a.y, a.eps)

    def cost(self, a: Operands) -> Cost:
        T, K = a.y.shape
        return Cost(nbytes(a.x, a.weight, a.y), 4 * T * K)


def norm_launches(x: DeviceArray, weight: DeviceArray, y: DeviceArray, eps: float) -> list[Launch]:
    """y (T, K) = the norm of x (T, K), all of one type."""
    assert x.contiguous and y.contiguous
    T, K = y.shape
    if T == 0:
        return []
    vec, iters, threads = _row_shape(K, vector_width(K, x, weight, y))
    return [
        RMS_NORM(y.dtype, vec, iters).launch(
            (T,), threads, x=x.ptr, weight=weight.ptr, y=y.ptr, K=K, eps=eps
        )
    ]


def _row_shape(K: int, vec: int) -> tuple[int, int, int]:
    """(elements a vector, vectors a thread, threads) for a row: by K and alignment alone."""
    if MAX_K[vec] < K:
        kind = "multiples of 8" if vec > 1 else "sizes that are not multiples of 8"
        raise InputError(f"rms_norm over {K} elements: at most {MAX_K[vec]} for {kind}")
    vectors = K // vec
    iters = 1
    while iters * MAX_THREADS < vectors:  # powers of two: fewer specialisations
        iters *= 2
    return vec, iters, align_up(ceil_div(vectors, iters), 32)
