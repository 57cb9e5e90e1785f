"""The tiles that products are cut into, for each kernel, and how fast they were measured to be.

Tiles of matmul_hopper.cu that were fastest on an H200 (us, 2026-11-30, in chains of 2 to 16
products, interleaved with cuBLAS, whose time stands below). Up to 640 rows and at 8192, but for the
head, products are those of a model's step: with residual or SiLU product, QKV at 8192 with RoPE and
KV write; cuBLAS only multiplies. 2x: in clusters of two. /s: with K split over s blocks. a:
consumers alternate.

    M     qkv 3072x2048    o 2048x2048      gate_up 16384x2048  down 2048x8192   head 128256x2048
    64    64x64     5.9    64x64/3    6.5   64x64       17.1    64x64/3    12.3  64x64     134.0
          cuBLAS    6.7               6.3               19.1               14.3            140.0
    128   2x64x64   6.0    2x64x64    5.3   128x128     19.3    128x96/5   15.0  a128x128  154.0
          cuBLAS    6.9               6.6               20.9               17.4            149.3
    192   64x96     7.6    64x64      6.0   192x128     21.7    192x96/5   18.3
          cuBLAS    8.3               6.7               23.1               22.5
    256   2x64x128  8.4    64x64      6.7   2x128x256   29.4    2x64x64    22.1  a128x128  218.3
          cuBLAS    7.9               6.6               27.6               21.5            200.1
    320   64x128    8.8    64x128     8.5   a128x128    41.6    64x128     28.2
          cuBLAS   10.5               7.0               36.0               23.5
    512   128x96   10.8    128x64     9.3   a128x128    55.2    2x64x128   31.4
          cuBLAS   11.2               9.2               57.3               29.3
    640   128x128  13.0    128x96    11.1   a128x128    66.1    128x96     37.6
          cuBLAS   13.7               9.8               69.4               31.4
    1024  128x192  18.6    128x128   13.2   a128x128   101.5    128x128    46.2
          cuBLAS   19.3              13.6              110.9               44.9
    8192  2x128x256 171    2x128x256 119    2x128x256  830      2x128x256  419
          cuBLAS    161              104               846                 401
"""

from __future__ import annotations

from typing import NamedTuple

from tinyvllm.util import ceil_div

TILE_K = 64  # elements of K in a step, for all kernels here
MAX_SPLIT = 5  # of K over the blocks of a cluster; a cluster of 8 was never faster
HOPPER_MAX_SPLIT = 6
MIN_SPLIT_TILES = 8  # of TILE_K, for each block: the sum over the cluster costs as much as several
MAX_CLUSTERED = 0.75  # of the places for blocks on the device: see matmul_choice.py
HOPPER_WARP_BUFFER = 2 * 16 * 128  # bytes: two pieces of 16 rows of at most 128 bytes
WARP_BUFFER = 16 * (128 + 16)  # in matmul_large.cu, rows are padded

# Constants of matmul_few_rows.cu: rows of x, columns of y in a block, elements of K in a step.
FEW_ROWS_MAX = 2
FEW_ROWS_COLS = 16
FEW_ROWS_STEP = 32


class FewRows(NamedTuple):
    """A specialisation of matmul_few_rows.cu: warps, and steps that each has in flight."""

    warps: int
    ring: int

    def smem(self, M: int, K: int) -> int:
        """Bytes of dynamic shared memory: the queues, 1 KiB a step, x and the norm's weight."""
        steps = ceil_div(ceil_div(K, FEW_ROWS_STEP), self.warps)  # of a warp
        return self.warps * (self.ring * 1024 + (M + 1) * steps * FEW_ROWS_STEP * 2)

    @property
    def blocks_per_sm(self) -> int:
        """That it is compiled for: an SM's queues have 192 KiB."""
        return 192 // (self.warps * self.ring)


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
    def max_split(self) -> int:
        return MAX_SPLIT

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: x and weight tiles of 16-bit elements."""
        return self.stages * (self.rows + self.cols) * TILE_K * 2


class LargeTile(NamedTuple):
    """A specialisation of matmul_large.cu: the tile that a block computes, and its pipeline."""

    rows: int
    cols: int
    warps_m: int
    warps_n: int
    depth: int  # elements of K in a stage
    stages: int

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * 32

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: x and weight tiles, a buffer for each warp's results."""
        stages = self.stages * (self.rows + self.cols) * self.depth * 2
        return stages + self.warps_m * self.warps_n * WARP_BUFFER


class WideTile(NamedTuple):
    """A specialisation of matmul_wide.cu: 64 columns of y by up to `rows`."""

    rows: int
    stages: int

    @property
    def cols(self) -> int:
        return 64

    @property
    def max_split(self) -> int:
        return MAX_SPLIT

    @property
    def smem(self) -> int:
        return self.stages * (self.rows + self.cols) * TILE_K * 2


class HopperTile(NamedTuple):
    """A specialisation of matmul_hopper.cu: a tile of y, its pipeline, how blocks work together.

    A tile has 64 * `parts` rows for each of `consumers` warpgroups, unless these `alternate`, and
    `cols` columns. A stage holds 64 elements of K. A cluster of `cluster` tiles next to each other
    along M shares the weights.
    """

    parts: int
    consumers: int
    cols: int
    stages: int
    cluster: int = 1
    alternate: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.parts * (1 if self.alternate else self.consumers)

    @property
    def boxes(self) -> int:
        """Stages that are loaded and multiplied together, as the kernel has it."""
        return 2 if self.rows * self.cols <= 64 * 64 else 1

    @property
    def max_split(self) -> int:
        """Of K over a cluster, by the room that the stages are for what other blocks send.

        The widest tiles have no registers to spare for it.
        """
        if self.alternate or self.cluster > 1 or self.parts * self.cols > 192:
            return 1
        room = self.stages * (self.rows + self.cols) * TILE_K * 2 // (self.cols * 32)
        return max(min(room - self.rows // 8 + 1, HOPPER_MAX_SPLIT), 1)

    def piece(self, silu: bool) -> int:
        """Columns of 16-bit results that leave at a time."""
        cols = self.cols // 2 if silu else self.cols
        return next(c for c in (64, 32, 16) if cols % c == 0)

    def smem(self, split: int, warp_buffer: int = HOPPER_WARP_BUFFER) -> int:
        """Bytes of dynamic shared memory: stages, without split a buffer for each warp's results,
        barriers."""
        tiles = self.stages * (self.rows + self.cols) * TILE_K * 2
        buffers = self.consumers * 4 * warp_buffer if split == 1 else 0
        return tiles + buffers + 8 * (2 * self.stages + self.consumers + 1)

    def threads(self, split: int) -> int:
        """Consumers and the producer: a warpgroup where it gives away registers."""
        sums = self.consumers * self.parts * self.cols
        gives = self.consumers > 1 and sums >= 384 and split == 1
        return 128 * self.consumers + (128 if gives else 32)


def num_tiles(tile: Tile | LargeTile | WideTile | HopperTile, M: int, N: int) -> int:
    """Of which y (M, N) consists, for whole clusters of them."""
    cluster = tile.cluster if isinstance(tile, HopperTile) else 1
    return ceil_div(M, tile.rows * cluster) * cluster * ceil_div(N, tile.cols)


# From the deepest queues and least blocks an SM on: see matmul_choice.py.
FEW_ROWS = (FewRows(8, 16), FewRows(8, 6), FewRows(4, 8))
TILES = (
    Tile(128, 128, 2, 2, 3, 1.0),
    Tile(64, 64, 2, 2, 5, 0.7),
    Tile(32, 64, 2, 2, 8, 0.5),
    Tile(32, 32, 2, 2, 6, 0.35),
)
# Up to 64 rows, by rows, where clusters exist: N is cut finely and K is split.
SPLIT_TILES = (Tile(16, 64, 1, 4, 8, 0.25), TILES[2], TILES[1])
# us for a tile of matmul_large.cu alone on an SM of an H200, and for two at a time; K = 2048. Of
# two of a size the second needs less shared memory, for GPUs where the first has no room. Eight
# warps have the registers of a whole SM.
LARGE_US = {
    LargeTile(256, 128, 4, 2, 64, 3): (38.0, 76.0),
    LargeTile(256, 128, 4, 2, 32, 3): (39.0, 78.0),
    LargeTile(128, 192, 4, 2, 64, 3): (33.0, 66.0),
    LargeTile(128, 192, 4, 2, 32, 4): (34.0, 68.0),
    LargeTile(128, 128, 2, 2, 64, 3): (23.5, 43.5),
    LargeTile(128, 128, 2, 2, 32, 4): (24.0, 44.5),
}
WIDE_TILES = (WideTile(16, 11), WideTile(32, 9))
# What a tile's products take for K = 2048 on a busy H200, in us, alone and with the SiLU product.
HOPPER_US = {
    HopperTile(1, 1, 64, 12): (5.0, 5.0),
    HopperTile(1, 1, 64, 12, cluster=2): (4.4, 4.4),
    HopperTile(1, 1, 96, 8): (6.2, 6.5),
    HopperTile(1, 1, 128, 8, cluster=2): (6.3, 6.9),
    HopperTile(1, 2, 64, 8): (7.0, 7.7),
    HopperTile(1, 2, 96, 7): (8.6, 9.6),  # this one and the next with K split only
    HopperTile(1, 3, 96, 5): (12.5, 13.5),
    HopperTile(1, 2, 128, 6): (10.3, 12.0),
    HopperTile(1, 3, 128, 4): (18.6, 19.6),
    HopperTile(1, 2, 192, 4): (18.6, 19.5),
    HopperTile(1, 2, 256, 4): (24.4, 25.5),
    HopperTile(1, 2, 256, 4, cluster=2): (24.0, 24.6),
    HopperTile(2, 2, 128, 6, alternate=True): (12.1, 12.5),
}
# The same for these numbers of rows, where most of what tiles load is found in L2: what differs,
# and tiles for them alone.
HOPPER_MIDDLE = range(257, 705)
HOPPER_MIDDLE_US = {
    HopperTile(1, 1, 128, 8): (6.6, 7.2),
    HopperTile(1, 1, 128, 8, cluster=2): (7.3, 7.9),
    HopperTile(1, 1, 192, 6): (8.5, 9.4),
    HopperTile(1, 2, 96, 6): (8.2, 9.4),
    HopperTile(1, 2, 128, 6): (10.5, 12.0),
    HopperTile(1, 3, 128, 4): (18.6, 19.4),
}
# Products of this many rows last so long that the card lowers its clock for want of power. The tile
# that moves least for its multiplications then wins, whatever it takes on a cool card.
HOPPER_LARGE_ROWS = 4096
HOPPER_LARGE = HopperTile(1, 2, 256, 4, cluster=2)
HOPPER_TILES = tuple(HOPPER_US | HOPPER_MIDDLE_US)
