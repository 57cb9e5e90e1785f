"""The kernel, tile and grid that compute a product, chosen by its shape and the device alone.

Measured on an H200 (us, as a chain of 16 products each; weights come from memory), for the
products of Llama-3.2-1B. RxC/s is a tile of matmul_wide.cu (w) or matmul.cu (t) with K split over s
blocks:

    M    qkv 3072x2048   o 2048x2048     gate_up 16384x2048  down 2048x8192  head 128256x2048
    16   w16x64/4 5.8    w16x64/4 4.7    w16x64 16.6         w16x64/5 10.7   w16x64 130
         t16x64/4 5.6    t16x64/4 4.5    t16x64 16.8         t16x64/4 11.1   t16x64 129
    32   w32x64/4 6.3    w32x64/4 4.8    w32x64 17.7         w32x64/5 11.0   w32x64 134
         t32x64/4 6.7    t32x64/4 5.4    t32x64 17.8         t32x64/4 12.8   t32x64 136
    64   w64x64/4 6.8    w64x64/4 5.7    w64x64 19.6         w64x64/5 13.3   w64x64 147
         t64x64/4 7.5    t64x64/4 6.6    t64x64 19.9         t64x64/4 17.2   t64x64 150
    128  w128x128/4 8.7  w128x64/3 7.9   w128x128 22.7       w128x64/3 16.8  w128x128 180
    256  w128x128/2 12.7 w128x128/3 10.1 w256x128 36.8       w128x128/3 22.5 w256x128 294

Whole decode steps of that model decide about one and two rows, as a product's weights are loaded
while the kernel before it ends, and attention holds shared memory meanwhile. At 1 row and context
128, in us, W/R being matmul_few_rows.cu with W warps and R steps in flight each: all products 8/8
910, 8/6 904, 8/16 825 (each SM having one block that takes tile after tile); 4/8 881; as `FEW_ROWS`
is used here 793. Each further row of x slows its short blocks: at 8 rows 8/6 takes 931 for qkv and
o alone, 1,279 for all products, and w16x64 894 for all.

Without the split, a wave of fewer blocks than SMs has too few loads in flight: at M = 32 down
takes 21.8 us. Clusters that fill the SMs to the last one wait for each other's places: t16x64/8
takes 13.8 us for down, w128x64/4 25.5.
"""

from __future__ import annotations

from typing import NamedTuple

from tinyvllm.driver.spec import DeviceInfo, Kernel
from tinyvllm.util import ceil_div

_SIGNATURE = (
    "ptr x, ptr weight, ptr bias, ptr residual, ptr y, i32 M, i32 N, i32 K, "
    "i32 x_stride, i32 residual_stride, i32 y_stride"
)
MATMUL = Kernel("matmul.cu", "matmul_kernel", f"{_SIGNATURE}, i32 split", pdl=True)
MATMUL_WIDE = Kernel(
    "matmul_wide.cu", "matmul_wide_kernel", f"{_SIGNATURE}, i32 split", arch="sm_90a", pdl=True
)
MATMUL_FEW_ROWS = Kernel(
    "matmul_few_rows.cu",
    "matmul_few_rows_kernel",
    "ptr x, ptr weight, ptr bias, ptr norm_weight, ptr residual, ptr y, i32 M, i32 N, i32 K, "
    "i32 x_stride, i32 residual_stride, i32 y_stride, f32 eps",
    pdl=True,
)

# Constants of matmul_few_rows.cu: rows of x, columns of y in a block, elements of K in a step.
FEW_ROWS_MAX = 2
FEW_ROWS_COLS = 16
FEW_ROWS_STEP = 32

TILE_K = 64  # of the tiled kernels
MAX_SPLIT = 5  # of K over the blocks of a cluster; a cluster of 8 was never faster
MIN_SPLIT_TILES = 8  # of TILE_K, for each block: the sum over the cluster costs as much as several
MAX_CLUSTERED = 0.75  # of the places for blocks on the device; see above
SM_RESERVED = 1024  # bytes of shared memory that the system takes for each block


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


class WideTile(NamedTuple):
    """A specialisation of matmul_wide.cu. `us` is what a tile takes for K = 2048 on a busy H200."""

    rows: int
    warpgroups: int
    stages: int
    us: float

    @property
    def cols(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def smem(self) -> int:
        return self.stages * (self.rows + self.cols) * TILE_K * 2


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


# From the deepest queues and least blocks an SM on: see `_few_rows`.
FEW_ROWS = (FewRows(8, 16), FewRows(8, 6), FewRows(4, 8))
TILES = (
    Tile(128, 128, 2, 2, 3, 1.0),
    Tile(64, 64, 2, 2, 5, 0.7),
    Tile(32, 64, 2, 2, 8, 0.5),
    Tile(32, 32, 2, 2, 6, 0.35),
)
# Up to 64 rows, by rows, where clusters exist: N is cut finely and K is split.
SPLIT_TILES = (Tile(16, 64, 1, 4, 8, 0.25), TILES[2], TILES[1])
WIDE_TILES = (
    WideTile(16, 1, 11, 16.6),
    WideTile(32, 1, 9, 17.7),
    WideTile(64, 1, 7, 19.6),
    WideTile(128, 1, 9, 15.0),
    WideTile(128, 2, 7, 20.0),
    WideTile(256, 2, 4, 36.8),
)


class Choice(NamedTuple):
    """How a product is launched; `template` lacks the element types before and silu after it."""

    kernel: Kernel
    template: tuple[int, ...]
    blocks: int
    threads: int
    smem: int
    split: int = 1
    pdl: bool = True


def choose(M: int, N: int, K: int, device: DeviceInfo) -> Choice:
    """The kernel for x (M, K) and weight (N, K)."""
    few, blocks = _few_rows(M, N, K, device), ceil_div(N, FEW_ROWS_COLS)
    if few is not None:
        return Choice(MATMUL_FEW_ROWS, few, blocks, few.warps * 32, few.smem(M, K))
    if device.kernel_path == "hopper":
        tile = _wide_tile(M, N, K, device)
        tiles, split = _tiles(tile, M, N), _split(tile, M, N, K, device)
        return Choice(MATMUL_WIDE, tile[:3], tiles * split, tile.threads, tile.smem, split)
    if _has_clusters(device) and SPLIT_TILES[-1].rows >= M:
        small = next(t for t in SPLIT_TILES if t.rows >= M)
        tiles, split = _tiles(small, M, N), _split(small, M, N, K, device)
        return Choice(MATMUL, small[:5], tiles * split, small.threads, small.smem, split)
    return _large_tiles(M, N, device)


def _few_rows(M: int, N: int, K: int, device: DeviceInfo) -> FewRows | None:
    """The specialisation of matmul_few_rows.cu, where it wins.

    Queues are as deep as they can be with all blocks on the SMs at once. Where there are more
    blocks than that, small ones take turns.
    """
    fitting = [f for f in FEW_ROWS if f.smem(M, K) <= device.smem_per_block]
    if M > FEW_ROWS_MAX or not fitting:
        return None
    blocks = ceil_div(N, FEW_ROWS_COLS)
    at_once = (f for f in fitting if blocks <= f.blocks_per_sm * device.num_sms)
    return next(at_once, fitting[-1])


def _has_clusters(device: DeviceInfo) -> bool:
    return device.compute_capability >= (9, 0)


def _tiles(tile: Tile | WideTile, M: int, N: int) -> int:
    return ceil_div(M, tile.rows) * ceil_div(N, tile.cols)


def _places(tile: Tile | WideTile, device: DeviceInfo) -> int:
    """Blocks that the device runs at once, by their shared memory."""
    smem = device.smem_per_block + SM_RESERVED
    return device.num_sms * (smem // (tile.smem + SM_RESERVED))


def _split(tile: Tile | WideTile, M: int, N: int, K: int, device: DeviceInfo) -> int:
    """The most blocks that may share out K for a tile."""
    by_places = int(MAX_CLUSTERED * _places(tile, device)) // _tiles(tile, M, N)
    return max(min(MAX_SPLIT, by_places, ceil_div(K, TILE_K) // MIN_SPLIT_TILES), 1)


def _wide_tile(M: int, N: int, K: int, device: DeviceInfo) -> WideTile:
    """The smallest tile with M rows; beyond 64 rows the one with the least estimated time."""
    if M <= 64:
        return next(t for t in WIDE_TILES if t.rows >= M)

    def time(tile: WideTile) -> float:
        split = _split(tile, M, N, K, device)
        waves = ceil_div(_tiles(tile, M, N) * split, _places(tile, device))
        sum_over_cluster = tile.rows * tile.cols / 6144 if split > 1 else 0.0
        return waves * tile.us * K / 2048 / split + sum_over_cluster

    return min((t for t in WIDE_TILES if t.rows > 64), key=time)


def _large_tiles(M: int, N: int, device: DeviceInfo) -> Choice:
    """A tile of matmul.cu without split.

    Large tiles are faster each, but too few of them leave SMs idle. The estimated time is the
    number of tiles of the busiest SM times a tile's size by its speed; the larger tile wins ties.
    """

    def time(tile: Tile) -> float:
        waves = ceil_div(_tiles(tile, M, N), device.num_sms)
        return waves * tile.rows * tile.cols / tile.speed

    tile = min(TILES, key=time)
    blocks = _tiles(tile, M, N)
    smem, one_wave = tile.smem, blocks <= device.num_sms
    if one_wave:
        # Started early, blocks crowd onto the SMs that are free already, two or three on one, and
        # the others stay idle (measured at batch 32: 1.96 instead of 1.26 ms a step). With more
        # than half of an SM's memory each, there is room for one.
        smem = max(smem, device.smem_per_block // 2 + 1024)
    return Choice(MATMUL, tile[:5], blocks, tile.threads, smem, pdl=one_wave)
