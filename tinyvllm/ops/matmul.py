"""Products of activations with weights, and the choice of kernel and tile for their shape."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Op, Program
from tinyvllm.util import ceil_div

_SIGNATURE = (
    "ptr x, ptr weight, ptr bias, ptr residual, ptr y, i32 M, i32 N, i32 K, "
    "i32 x_stride, i32 residual_stride, i32 y_stride"
)
MATMUL = Kernel("matmul.cu", "matmul_kernel", _SIGNATURE, pdl=True)
MATMUL_FEW_ROWS = Kernel("matmul_few_rows.cu", "matmul_few_rows_kernel", _SIGNATURE, pdl=True)

# Constants of matmul_few_rows.cu: columns of y in a block, elements of K in a step, steps whose
# weights a warp has in flight and their bytes, most warps in a block.
FEW_ROWS_COLS = 16
FEW_ROWS_STEP = 32
FEW_ROWS_RING = 4
FEW_ROWS_STEP_BYTES = 1024
FEW_ROWS_WARPS = 16
# Up to so many rows of x, the tensor cores' idle columns cost nothing: weights are the bound.
FEW_ROWS_MAX = 16

TILE_K = 64  # of matmul.cu


class Tile(NamedTuple):
    """A specialisation of matmul.cu: the tile of y that a block computes, and its pipeline.

    `speed` is the relative rate of multiplications of an SM full of such blocks: larger tiles
    load each operand less often.
    """

    rows: int
    cols: int
    warps_m: int
    warps_n: int
    stages: int
    speed: float

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * 32

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: x and weight tiles of 16-bit elements."""
        return self.stages * (self.rows + self.cols) * TILE_K * 2


TILES = (
    Tile(128, 128, 2, 2, 3, 1.0),
    Tile(64, 64, 2, 2, 4, 0.7),
    Tile(32, 64, 2, 2, 8, 0.5),
    Tile(32, 32, 2, 2, 6, 0.35),
)


def choose_tile(M: int, N: int, num_sms: int) -> Tile | None:
    """The tile of matmul.cu for a product with M x N results; None: matmul_few_rows.cu.

    Large tiles are faster each, but too few of them leave SMs idle. The estimated time is the
    number of tiles of the busiest SM times a tile's size by its speed; the larger tile wins ties.
    """
    # Measured on an H200: up to 8 rows matmul_few_rows.cu wins for all shapes; from 9 on it holds
    # half as many loads in flight and wins only where its blocks are all on the SMs at once
    # (N = 2048, K = 8192 at M = 16: 12.7 against 23.2 us; N = 16384, K = 2048: 30.6 against 20.6).
    if M <= 8 or (M <= FEW_ROWS_MAX and ceil_div(N, FEW_ROWS_COLS) <= num_sms):
        return None

    def time(tile: Tile) -> float:
        tiles = ceil_div(M, tile.rows) * ceil_div(N, tile.cols)
        return ceil_div(tiles, num_sms) * tile.rows * tile.cols / tile.speed

    return min(TILES, key=time)


def few_rows_warps(K: int) -> int:
    """Warps that share K in a block of matmul_few_rows.cu.

    It fixes the order of the sum, so it may depend on nothing else.
    """
    return min(ceil_div(ceil_div(K, FEW_ROWS_STEP), FEW_ROWS_RING), FEW_ROWS_WARPS)


def matmul_launch(a: Operands, device: DeviceInfo, *, silu: bool = False) -> Launch:
    """The launch for x (M, K), weight (N, K) and, where the op has them, bias and residual."""
    (M, K), N = a.x.shape, a.weight.shape[0]
    residual = getattr(a, "residual", None)
    assert a.x.ptr % 16 == 0 and a.x.row_stride % 8 == 0 and a.weight.ptr % 16 == 0
    assert all(o is None or o.ptr % (2 * o.dtype.itemsize) == 0 for o in (a.bias, residual, a.y))
    args = {
        "x": a.x.ptr,
        "weight": a.weight.ptr,
        "bias": 0 if a.bias is None else a.bias.ptr,
        "residual": 0 if residual is None else residual.ptr,
        "y": a.y.ptr,
        "M": M,
        "N": N,
        "K": K,
        "x_stride": a.x.row_stride,
        "residual_stride": 0 if residual is None else residual.row_stride,
        "y_stride": a.y.row_stride,
    }
    tile = choose_tile(M, N, device.num_sms)
    if tile is None:
        warps = few_rows_warps(K)
        return MATMUL_FEW_ROWS(a.act, a.y.dtype, 8 if M <= 8 else 16, silu).launch(
            (ceil_div(N, FEW_ROWS_COLS),),
            warps * 32,
            smem=warps * FEW_ROWS_RING * FEW_ROWS_STEP_BYTES,
            **args,
        )
    blocks = ceil_div(M, tile.rows) * ceil_div(N, tile.cols)
    smem, one_wave = tile.smem, blocks <= device.num_sms
    if one_wave:
        # Started early, blocks crowd onto the SMs that are free already, two or three on one, and
        # the others stay idle (measured at batch 32: 1.96 instead of 1.26 ms a step). With more
        # than half of an SM's memory each, there is room for one.
        smem = max(smem, device.smem_per_block // 2 + 1024)
    return MATMUL(a.act, a.y.dtype, *tile[:5], silu).launch(
        (blocks,), tile.threads, smem=smem, pdl=one_wave, **args
    )


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


class Matmul(OpDef):
    """y = x weight^T + bias. x (M, K), weight (N, K), bias (N,) or absent, y (M, N) activations
    or float32. K must be a multiple of 8."""

    name = "matmul"
    reads = {"x": ("M", "K"), "weight": ("N", "K"), "bias": ("N",)}
    writes = {"y": ("M", "N")}
    optional = frozenset({"bias"})
    batch_invariant = False  # the kernel changes with M

    def reference(self, a: Operands) -> None:
        np.matmul(a.x, a.weight.T, out=a.y)
        if a.bias is not None:
            a.y += a.bias

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return [matmul_launch(a, device)]

    def cost(self, a: Operands) -> Cost:
        return matmul_cost(a)

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_depth(program, op)


class MatmulAdd(OpDef):
    """y = x weight^T + bias + residual, rounded once. residual (M, N); else as matmul."""

    name = "matmul_add"
    reads = {
        "x": ("M", "K"),
        "weight": ("N", "K"),
        "bias": ("N",),
        "residual": ("M", "N"),
    }
    writes = {"y": ("M", "N")}
    optional = frozenset({"bias"})
    batch_invariant = False

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return [matmul_launch(a, device)]

    def cost(self, a: Operands) -> Cost:
        return matmul_cost(a)

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_depth(program, op)


class MatmulSiluMul(OpDef):
    """y = silu(gate) * up with gate and up from one product. x (M, K), y (M, I), I % 8 == 0.

    weight (2 I, K) alternates 8 gate rows with their 8 up rows; bias (2 I,) likewise or absent.
    """

    name = "matmul_silu_mul"
    reads = {"x": ("M", "K"), "weight": ("N2", "K"), "bias": ("N2",)}
    writes = {"y": ("M", "I")}
    optional = frozenset({"bias"})
    batch_invariant = False

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return [matmul_launch(a, device, silu=True)]

    def cost(self, a: Operands) -> Cost:
        return matmul_cost(a)

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_depth(program, op)
        rows = program.shape_of(op.operands["weight"])[0]
        cols = program.shape_of(op.operands["y"])[1]
        if not isinstance(cols, int) or rows != 2 * cols or cols % 8:
            raise ValueError(
                f"{self.name}: {rows} weight rows for {cols} columns: must be twice "
                "as many, and columns a multiple of 8"
            )
