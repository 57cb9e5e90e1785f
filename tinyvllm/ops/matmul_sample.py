"""The head's product and plain sampling: at many rows on Hopper no logits are ever written."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.matmul import Matmul, check_depth, hopper_operands
from tinyvllm.ops.matmul_choice_hopper import hopper_choice
from tinyvllm.ops.matmul_kernels import Choice
from tinyvllm.ops.matmul_tiles import HopperTile
from tinyvllm.ops.norm_matmul import NormMatmul
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Op, Program, Shape
from tinyvllm.ops.rms_norm import norm_launches
from tinyvllm.ops.sample import Sample
from tinyvllm.util import DType, align_up, ceil_div

MATMUL_SAMPLE = Kernel(
    "matmul_hopper.cu",
    "matmul_sample_kernel",
    "map x_map, map weight_map, ptr sample_slots, ptr sample_positions, ptr row_params, "
    "ptr candidates, i32 M, i32 N, i32 K, i32 group",
    arch="sm_90a",
    pdl=True,
)
MATMUL_SAMPLE_BEST = Kernel(
    "matmul_sample_best.cu",
    "matmul_sample_best_kernel",
    "ptr candidates, ptr tokens, i32 per_row",
    pdl=True,
)
BEST_THREADS = 128
CANDIDATE_BYTES = 8
LOGITS_ROWS = 32  # up to as many rows another kernel makes the logits
# By the number of rows up to which they are taken (docs/decode.md, step 13).
SAMPLE_TILES = {
    64: HopperTile(1, 2, 128, 8, alternate=True),
    128: HopperTile(2, 2, 128, 7, alternate=True),
    192: HopperTile(1, 3, 128, 5),
    1 << 31: HopperTile(2, 2, 128, 7, alternate=True),
}


def choose_sample(M: int, N: int, device: DeviceInfo) -> Choice | None:
    """The kernel that makes logits and keeps only the best of them, if there is one."""
    if device.kernel_path != "hopper" or M <= LOGITS_ROWS:
        return None
    return sample_choice(next(t for rows, t in SAMPLE_TILES.items() if rows >= M), M, N, device)


def sample_choice(tile: HopperTile, M: int, N: int, device: DeviceInfo) -> Choice:
    """A launch of this kernel with such a tile."""
    choice = hopper_choice(tile, 1, M, N, device)
    return choice._replace(
        kernel=MATMUL_SAMPLE, template=tuple(tile), smem=tile.smem(1, warp_buffer=0)
    )


class MatmulSample(OpDef):
    """tokens = sample(x weight^T), unfiltered. x (S, K), weight (V, K), K a multiple of 8."""

    name = "matmul_sample"
    product: ClassVar[OpDef] = Matmul()
    reads: ClassVar[Mapping[str, Shape]] = {
        "x": ("S", "K"),
        "weight": ("V", "K"),
        **{name: shape for name, shape in Sample.reads.items() if name != "logits"},
    }
    writes = Sample.writes
    out_dtypes = Sample.out_dtypes
    batch_invariant = Matmul.batch_invariant

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        rows, vocab = a.x.shape[0], a.weight.shape[0]
        choice = choose_sample(rows, vocab, device)
        if choice is not None:
            x, before = self.input(a)
            return [*before, *race_launches(choice, a, x, a.scratch + self.input_bytes(a))]
        logits = DeviceArray(a.scratch + self.input_bytes(a), (rows, vocab), DType.F32)
        have: dict[str, Any] = vars(a)
        return [
            *self.product.launches(Operands(**{**have, "y": logits, "bias": None}), device),
            *Sample().launches(Operands(**{**have, "logits": logits, "filtered": False}), device),
        ]

    def input(self, a: Operands) -> tuple[DeviceArray, list[Launch]]:
        """What is multiplied, and the launches that make it."""
        return a.x, []

    def input_bytes(self, a: Operands) -> int:
        """Of scratch memory for it."""
        return 0

    def scratch(self, a: Operands, device: DeviceInfo) -> int:
        """For the logits of as many rows as have any, or the candidates of all."""
        rows, vocab = a.x.shape[0], a.weight.shape[0]
        candidates = 0
        if choose_sample(rows, vocab, device) is not None:
            tile_cols = min(tile.cols for tile in SAMPLE_TILES.values())
            candidates = rows * ceil_div(vocab, tile_cols) * CANDIDATE_BYTES
            rows = LOGITS_ROWS
        return self.input_bytes(a) + max(candidates, int(rows * vocab) * 4)

    def cost(self, a: Operands) -> Cost:
        moved = (prod(a.x.shape) + prod(a.weight.shape)) * a.act.itemsize + 4 * a.tokens.shape[0]
        return Cost(moved, 2 * a.x.shape[0] * prod(a.weight.shape))

    def check(self, program: Program, op: Op) -> None:
        super().check(program, op)
        check_depth(program, op)


class NormMatmulSample(MatmulSample):
    """As matmul_sample, for the product norm_matmul."""

    name = "norm_matmul_sample"
    product = NormMatmul()
    reads: ClassVar[Mapping[str, Shape]] = {**MatmulSample.reads, "norm_weight": ("K",)}
    attrs = NormMatmul.attrs

    def input(self, a: Operands) -> tuple[DeviceArray, list[Launch]]:
        normed = DeviceArray(a.scratch, a.x.shape, a.act, max_rows=a.x.max_rows)
        return normed, norm_launches(a.x, a.norm_weight, normed, a.eps)

    def input_bytes(self, a: Operands) -> int:
        return align_up(a.x.max_rows * int(a.x.shape[1]) * a.act.itemsize, 256)

    def cost(self, a: Operands) -> Cost:
        product = super().cost(a)
        return Cost(product.bytes + prod(a.norm_weight.shape) * a.act.itemsize, product.flops)


def race_launches(choice: Choice, a: Operands, x: DeviceArray, candidates: int) -> list[Launch]:
    """The product of x that leaves the best of each row's tiles, and what chooses among these."""
    tile_cols = choice.boxes[1] * choice.cluster
    return [
        choice.kernel(a.act, *choice.template).launch(
            (choice.blocks,),
            choice.threads,
            smem=choice.smem,
            cluster=choice.cluster,
            sample_slots=a.sample_slots.ptr,
            sample_positions=a.sample_positions.ptr,
            row_params=a.row_params.ptr,
            candidates=candidates,
            **hopper_operands(choice, x, a.weight),
        ),
        MATMUL_SAMPLE_BEST().launch(
            (x.shape[0],),
            BEST_THREADS,
            candidates=candidates,
            tokens=a.tokens.ptr,
            per_row=ceil_div(a.weight.shape[0], tile_cols),
        ),
    ]
