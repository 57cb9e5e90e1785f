"""RMSNorm and the product that reads it: one kernel at few rows, otherwise one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.matmul import Matmul, MatmulSiluMul, Product, matmul_cost, matmul_launch
from tinyvllm.ops.matmul_choice import choose
from tinyvllm.ops.matmul_kernels import MATMUL_FEW_ROWS
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Op, Program, Shape
from tinyvllm.ops.rms_norm import norm_launches
from tinyvllm.util import DType


class NormMatmul(OpDef):
    """y = rms_norm(x) weight^T + bias. norm_weight (K,); else as matmul.

    Where one kernel computes it all, x * norm_weight is rounded instead of the normed x, and the
    root of the mean is applied to the sums.
    """

    name = "norm_matmul"
    product: ClassVar[type[Product]] = Matmul
    reads: ClassVar[Mapping[str, Shape]] = {**Matmul.reads, "norm_weight": ("K",)}
    writes: ClassVar[Mapping[str, Shape]] = Matmul.writes
    optional = frozenset({"bias"})
    attrs = frozenset({"eps"})
    batch_invariant = False

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        (M, K), N = a.x.shape, a.weight.shape[0]
        # In float16, x * norm_weight may be out of range.
        if (
            a.act is DType.BF16
            and choose(M, N, K, device, silu=self.product.silu).kernel is MATMUL_FEW_ROWS
        ):
            return [matmul_launch(a, device, silu=self.product.silu)]
        normed = DeviceArray(a.scratch, a.x.shape, a.act, max_rows=a.x.max_rows)
        product = Operands(x=normed, weight=a.weight, bias=a.bias, y=a.y, act=a.act)
        return [
            *norm_launches(a.x, a.norm_weight, normed, a.eps),
            matmul_launch(product, device, silu=self.product.silu),
        ]

    def scratch(self, a: Operands, device: DeviceInfo) -> int:
        """For the normed x."""
        M, K = a.x.shape
        return int(M * K * a.act.itemsize)

    def cost(self, a: Operands) -> Cost:
        product = matmul_cost(a)
        return Cost(product.bytes + nbytes(a.norm_weight), product.flops)

    def check(self, program: Program, op: Op) -> None:
        product = {n: b for n, b in op.operands.items() if n != "norm_weight"}
        self.product().check(program, Op(self.product.name, product))
        super().check(program, op)


class NormMatmulSiluMul(NormMatmul):
    """As norm_matmul, for the product matmul_silu_mul."""

    name = "norm_matmul_silu_mul"
    product = MatmulSiluMul
    reads: ClassVar[Mapping[str, Shape]] = {**MatmulSiluMul.reads, "norm_weight": ("K",)}
    writes: ClassVar[Mapping[str, Shape]] = MatmulSiluMul.writes
