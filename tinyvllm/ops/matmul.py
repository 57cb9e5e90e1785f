"""Products of activations with weights."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Launch, TensorMap
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.matmul_choice import choose
from tinyvllm.ops.matmul_kernels import MATMUL_FEW_ROWS, MATMUL_HOPPER, MATMUL_LARGE, Choice
from tinyvllm.ops.matmul_tiles import TILE_K
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Op, Program


def matmul_launch(a: Operands, device: DeviceInfo, *, silu: bool = False) -> Launch:
    """The launch for x (M, K), weight (N, K) and, where the op has them, bias and residual.

    With an operand norm_weight, x is normed first; only matmul_few_rows.cu can.
    """
    (M, K), N = a.x.shape, a.weight.shape[0]
    return launch_of(choose(M, N, K, device, silu=silu), a, silu)


def launch_of(choice: Choice, a: Operands, silu: bool) -> Launch:
    """The launch of a product by the kernel, tile and grid chosen."""
    (M, K), N = a.x.shape, a.weight.shape[0]
    residual, norm_weight = getattr(a, "residual", None), getattr(a, "norm_weight", None)
    assert residual is None or not silu
    assert a.x.ptr % 16 == 0 and a.x.row_stride % 8 == 0 and a.weight.ptr % 16 == 0
    assert all(o is None or o.ptr % (2 * o.dtype.itemsize) == 0 for o in (a.bias, residual, a.y))
    args: dict[str, Any] = {
        "bias": 0 if a.bias is None else a.bias.ptr,
        "residual": 0 if residual is None else residual.ptr,
        "y": a.y.ptr,
        "M": M,
        "N": N,
        "K": K,
        "residual_stride": 0 if residual is None else residual.row_stride,
        "y_stride": a.y.row_stride,
    }
    if choice.kernel is MATMUL_HOPPER:
        args |= hopper_operands(choice, a.x, a.weight)
        by_map = a.y.dtype is a.act and a.y.ptr % 16 == 0 and a.y.row_stride % 8 == 0
        args["y_map"] = result_map(a.y, choice.piece) if by_map else args["x_map"]
        args["by_map"] = int(by_map)
    else:
        args |= {"x": a.x.ptr, "weight": a.weight.ptr, "x_stride": a.x.row_stride}
    template: tuple[int | bool, ...] = (*choice.template, silu)
    if choice.kernel is MATMUL_FEW_ROWS:
        template = (*template, norm_weight is not None)
        args["norm_weight"] = 0 if norm_weight is None else norm_weight.ptr
        args["eps"] = 0.0 if norm_weight is None else a.eps
    else:
        assert norm_weight is None
        if choice.kernel is MATMUL_LARGE:
            # Within a tile it counts bytes by 32 bits.
            assert choice.template[0] * max(a.x.row_stride, K) * 2 < 1 << 32
        else:
            args["split"] = choice.split
    return choice.kernel(a.act, a.y.dtype, *template).launch(
        (choice.blocks,),
        choice.threads,
        smem=choice.smem,
        cluster=choice.cluster,
        pdl=choice.pdl,
        **args,
    )


def hopper_operands(choice: Choice, x: DeviceArray, weight: DeviceArray) -> dict[str, Any]:
    """What all kernels of matmul_hopper.cu take of x (M, K) and the weight (N, K)."""
    (M, K), N = x.shape, weight.shape[0]
    assert x.ptr % 16 == 0 and x.row_stride % 8 == 0 and weight.ptr % 16 == 0
    x_rows, weight_rows = choice.boxes
    return {
        "x_map": TensorMap(x.ptr, x.dtype, x.max_rows, K, x.row_stride, x_rows, TILE_K),
        "weight_map": TensorMap(weight.ptr, weight.dtype, N, K, K, weight_rows, TILE_K),
        "M": M,
        "N": N,
        "K": K,
        "group": choice.group,
    }


def result_map(y: DeviceArray, piece: int) -> TensorMap:
    """By which matmul_hopper.cu writes 16 rows of `piece` columns of 16-bit results at a time."""
    cols = prod(y.shape[1:])
    return TensorMap(y.ptr, y.dtype, y.max_rows, cols, y.row_stride, 16, piece, swizzle=2 * piece)


def matmul_cost(a: Operands) -> Cost:
    """Each operand moved once; a multiplication and an addition for each weight and row of x."""
    operands = (a.x, a.weight, a.bias, getattr(a, "residual", None), a.y)
    moved = sum(prod(o.shape) * o.dtype.itemsize for o in operands if o is not None)
    return Cost(moved, 2 * a.x.shape[0] * prod(a.weight.shape))


def check_depth(program: Program, op: Op) -> None:
    """ValueError unless rows of the weight divide into the 16-byte pieces that kernels load."""
    K = program.shape_of(op.operands["weight"])[1]
    if not isinstance(K, int) or K % 8:
        raise ValueError(f"{op.kind}: K={K} must be a multiple of 8")


class Product(OpDef):
    """What ops share that are a product of x with a weight, whatever is done to its result."""

    optional = frozenset({"bias"})
    batch_invariant = False  # the kernel changes with M
    silu = False

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return [matmul_launch(a, device, silu=self.silu)]

    def cost(self, a: Operands) -> Cost:
        return matmul_cost(a)

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_depth(program, op)


class Matmul(Product):
    """y = x weight^T + bias. x (M, K), weight (N, K), bias (N,) or absent, y (M, N) activations
    or float32. K must be a multiple of 8."""

    name = "matmul"
    reads = {"x": ("M", "K"), "weight": ("N", "K"), "bias": ("N",)}
    writes = {"y": ("M", "N")}

    def reference(self, a: Operands) -> None:
        np.matmul(a.x, a.weight.T, out=a.y)
        if a.bias is not None:
            a.y += a.bias


class MatmulAdd(Product):
    """y = x weight^T + bias + residual, rounded once. residual (M, N); else as matmul."""

    name = "matmul_add"
    reads = {
        "x": ("M", "K"),
        "weight": ("N", "K"),
        "bias": ("N",),
        "residual": ("M", "N"),
    }
    writes = {"y": ("M", "N")}


class MatmulSiluMul(Product):
    """y = silu(gate) * up with gate and up from one product. x (M, K), y (M, I), I % 8 == 0.

    weight (2 I, K) alternates 8 gate rows with their 8 up rows; bias (2 I,) likewise or absent.
    """

    name = "matmul_silu_mul"
    reads = {"x": ("M", "K"), "weight": ("N2", "K"), "bias": ("N2",)}
    writes = {"y": ("M", "I")}
    silu = True

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        rows = program.shape_of(op.operands["weight"])[0]
        cols = program.shape_of(op.operands["y"])[1]
        if not isinstance(cols, int) or rows != 2 * cols or cols % 8:
            raise ValueError(
                f"{self.name}: {rows} weight rows for {cols} columns: must be twice "
                "as many, and columns a multiple of 8"
            )
