"""The product that makes q, k and v, their RoPE and the KV write: one kernel on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import ClassVar

from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.attention import kv_address
from tinyvllm.ops.matmul import (
    Matmul,
    check_depth,
    hopper_operands,
    matmul_launch,
    result_map,
)
from tinyvllm.ops.matmul_choice import ROPE_ROWS, choose_rope
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Op, Program, Shape
from tinyvllm.ops.rope import RopeKvWrite, rope_kv_write_launch


class MatmulRopeKvWrite(OpDef):
    """rope_kv_write of x weight^T + bias, rounded before the rotation; x (T, K), weight (N, K)."""

    name = "matmul_rope_kv_write"
    reads: ClassVar[Mapping[str, Shape]] = {
        "x": ("T", "K"),
        "weight": ("N", "K"),
        "bias": ("N",),
        **{name: shape for name, shape in RopeKvWrite.reads.items() if name != "qkv"},
    }
    writes: ClassVar[Mapping[str, Shape]] = RopeKvWrite.writes
    optional = Matmul.optional
    attrs = RopeKvWrite.attrs
    batch_invariant = Matmul.batch_invariant

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        (tokens, K), N = a.x.shape, a.weight.shape[0]
        head_dim = a.kv_cache.shape[-1]
        choice = choose_rope(tokens, N, K, head_dim, device)
        if choice is None:
            qkv = DeviceArray(a.scratch, (tokens, N), a.act)
            product = Operands(x=a.x, weight=a.weight, bias=a.bias, y=qkv, act=a.act)
            return [matmul_launch(product, device), rope_kv_write_launch(a, qkv)]
        assert a.q.ptr % 16 == 0 and a.q.row_stride % 8 == 0
        return [
            choice.kernel(a.act, *choice.template).launch(
                (choice.blocks,),
                choice.threads,
                smem=choice.smem,
                cluster=choice.cluster,
                q_map=result_map(a.q, choice.piece),
                bias=0 if a.bias is None else a.bias.ptr,
                positions=a.positions.ptr,
                token_slots=a.token_slots.ptr,
                inv_freq=a.inv_freq.ptr,
                q=a.q.ptr,
                q_stride=a.q.row_stride,
                num_heads=a.q.shape[1] // head_dim,
                **hopper_operands(choice, a.x, a.weight),
                **kv_address(a),
            )
        ]

    def scratch(self, a: Operands, device: DeviceInfo) -> int:
        """For q, k and v of as many tokens as take two kernels."""
        (tokens, K), N = a.x.shape, a.weight.shape[0]
        head_dim = a.kv_cache.shape[-1]
        if choose_rope(tokens, N, K, head_dim, device) is not None:
            tokens = ROPE_ROWS[head_dim] - 1
        return int(tokens * N * a.act.itemsize)

    def cost(self, a: Operands) -> Cost:
        (tokens, _), N = a.x.shape, a.weight.shape[0]
        moved = sum(prod(o.shape) for o in (a.x, a.weight, a.bias) if o is not None) + tokens * N
        small = 3 * tokens + a.inv_freq.shape[0]
        return Cost(moved * a.act.itemsize + 4 * small, 2 * tokens * prod(a.weight.shape))

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_depth(program, op)
