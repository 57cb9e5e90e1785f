"""Products of normalised activations: one kernel for few rows, two for many."""

from __future__ import annotations

from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.matmul import check_depth, check_gate_up, matmul_cost, matmul_launch
from tinyvllm.ops.matmul_choice import choose
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Op, Program
from tinyvllm.ops.rms_norm import RmsNorm


class RmsNormMatmul(OpDef):
    """y = rms_norm(x) weight^T + bias: rms_norm by norm_weight and eps, the rest as matmul."""

    name = "rms_norm_matmul"
    reads = {"x": ("M", "K"), "norm_weight": ("K",), "weight": ("N", "K"), "bias": ("N",)}
    writes = {"y": ("M", "N")}
    optional = frozenset({"bias"})
    attrs = frozenset({"eps"})
    batch_invariant = False
    silu = False

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        (M, K), N = a.x.shape, a.weight.shape[0]
        if choose(M, N, K, device).norm:
            return [matmul_launch(a, device, silu=self.silu)]
        h = DeviceArray(a.scratch, (M, K), a.act)
        norm = Operands(x=a.x, weight=a.norm_weight, y=h, eps=a.eps, act=a.act)
        product = Operands(x=h, weight=a.weight, bias=a.bias, y=a.y, act=a.act)
        return [
            *RmsNorm().launches(norm, device),
            matmul_launch(product, device, silu=self.silu),
        ]

    def scratch(self, a: Operands, device: DeviceInfo) -> int:
        return nbytes(a.x)  # the normalised rows

    def cost(self, a: Operands) -> Cost:
        product = matmul_cost(a)
        M, K = a.x.shape
        return Cost(product.bytes + nbytes(a.norm_weight), product.flops + 4 * M * K)

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_depth(program, op)


class RmsNormMatmulSiluMul(RmsNormMatmul):
    """y = silu(gate) * up of rms_norm(x), as rms_norm_matmul and matmul_silu_mul."""

    name = "rms_norm_matmul_silu_mul"
    reads = {"x": ("M", "K"), "norm_weight": ("K",), "weight": ("N2", "K"), "bias": ("N2",)}
    writes = {"y": ("M", "I")}
    silu = True

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_gate_up(program, op)
