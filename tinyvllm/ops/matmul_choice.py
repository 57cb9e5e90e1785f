"""The kernel, tile and grid that compute a product, chosen by its shape and the device alone.

Measured on an H200 (us, as a chain of 16 products each; weights come from memory), for the
products of Llama-3.2-1B. RxC/s is a tile of matmul_hopper.cu, matmul_wide.cu (w) or matmul.cu (t)
with K split over s blocks:

    M    qkv 3072x2048   o 2048x2048     gate_up 16384x2048  down 2048x8192  head 128256x2048
    16   w16x64/4 5.8    w16x64/4 4.7    w16x64 16.6         w16x64/5 10.7   w16x64 130
         t16x64/4 5.6    t16x64/4 4.5    t16x64 16.8         t16x64/4 11.1   t16x64 129
    32   w32x64/4 6.3    w32x64/4 4.8    w32x64 17.7         w32x64/5 11.0   w32x64 134
         64x64/4 7.2     64x64/4 5.8     64x64 23.2          64x64/6 13.4    64x128 133
         t32x64/4 6.7    t32x64/4 5.4    t32x64 17.8         t32x64/4 12.8   t32x64 136
    64   t64x64/4 7.5    t64x64/4 6.6    t64x64 19.9         t64x64/4 17.2   t64x64 150

From 33 rows on, matmul_hopper.cu has the tiles of `matmul_tiles.py`, with their times there.

Whole decode steps of that model decide about one and two rows, as a product's weights are loaded
while the kernel before it ends, and attention holds shared memory meanwhile. At 1 row and context
128, in us, W/R being matmul_few_rows.cu with W warps and R steps in flight each: all products 8/8
910, 8/6 904, 8/16 825 (each SM having one block that takes tile after tile); 4/8 881; as `FEW_ROWS`
is used here 793. Each further row of x slows its short blocks: at 8 rows 8/6 takes 931 for qkv and
o alone, 1,279 for all products, and w16x64 894 for all.

Without the split, a wave of fewer blocks than SMs has too few loads in flight: at M = 32 down
takes 21.8 us. Clusters that fill the SMs to the last one wait for each other's places: t16x64/8
takes 13.8 us for down, 128x128/8 21.4.
"""

from __future__ import annotations

from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.ops.matmul_choice_hopper import hopper_choice, hopper_tile
from tinyvllm.ops.matmul_kernels import (
    MATMUL,
    MATMUL_FEW_ROWS,
    MATMUL_LARGE,
    MATMUL_ROPE_KV_WRITE,
    MATMUL_WIDE,
    Choice,
)
from tinyvllm.ops.matmul_tiles import (
    FEW_ROWS,
    FEW_ROWS_COLS,
    FEW_ROWS_MAX,
    LARGE_US,
    MAX_CLUSTERED,
    MIN_SPLIT_TILES,
    SPLIT_TILES,
    TILE_K,
    TILES,
    WIDE_TILES,
    FewRows,
    LargeTile,
    Tile,
    WideTile,
    num_tiles,
)
from tinyvllm.util import ceil_div

ROPE_ROWS = {64: 33, 128: 65}  # by head_dim: rows from which on tiles have whole heads
SM_RESERVED = 1024  # bytes of shared memory that the system takes for each block


def choose(M: int, N: int, K: int, device: DeviceInfo, *, silu: bool = False) -> Choice:
    """The kernel for x (M, K) and weight (N, K); `silu`: rows of gate and up, for their product."""
    few = _few_rows(M, N, K, device)
    if few is not None:
        blocks = ceil_div(N, FEW_ROWS_COLS)
        return Choice(MATMUL_FEW_ROWS, few, blocks, few.warps * 32, few.smem(M, K))
    if device.kernel_path == "hopper" and WIDE_TILES[-1].rows >= M:
        wide = next(t for t in WIDE_TILES if t.rows >= M)
        split = _split(wide, M, N, K, device)
        blocks = num_tiles(wide, M, N) * split
        return Choice(MATMUL_WIDE, tuple(wide), blocks, 128, wide.smem, split, cluster=split)
    if device.kernel_path == "hopper":
        tile, split = hopper_tile(M, N, K, device, silu)
        return hopper_choice(tile, split, M, N, device, silu=silu)
    if _has_clusters(device) and SPLIT_TILES[-1].rows >= M:
        small = next(t for t in SPLIT_TILES if t.rows >= M)
        tiles, split = num_tiles(small, M, N), _split(small, M, N, K, device)
        return Choice(
            MATMUL, small[:5], tiles * split, small.threads, small.smem, split, cluster=split
        )
    return _large_tiles(M, N, device) or _whole_tiles(M, N, device)


def choose_rope(M: int, N: int, K: int, head_dim: int, device: DeviceInfo) -> Choice | None:
    """The kernel that makes heads of q, k and v and also rotates and writes them, if there is one.

    It is matmul_hopper.cu with a tile that has whole heads, for as many rows as are its own.
    """
    if device.kernel_path != "hopper" or head_dim not in ROPE_ROWS or ROPE_ROWS[head_dim] > M:
        return None
    tile, _ = hopper_tile(M, N, K, device, silu=False, head_dim=head_dim)
    choice = hopper_choice(tile, 1, M, N, device)
    # Groups of as many rows as without a cluster: 171 instead of 189 us at 8192 rows. Others of the
    # large products have more columns, or do not care: gate and up 840 instead of 830.
    group = choice.group // tile.cluster
    return choice._replace(kernel=MATMUL_ROPE_KV_WRITE, template=(*tile, head_dim), group=group)


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


def _places(tile: Tile | LargeTile | WideTile, device: DeviceInfo) -> int:
    """Blocks that the device runs at once, by their shared memory."""
    smem = device.smem_per_block + SM_RESERVED
    return device.num_sms * (smem // (tile.smem + SM_RESERVED))


def _split(tile: Tile | WideTile, M: int, N: int, K: int, device: DeviceInfo) -> int:
    """The most blocks that may share out K for a tile."""
    by_places = int(MAX_CLUSTERED * _places(tile, device)) // num_tiles(tile, M, N)
    return max(min(tile.max_split, by_places, ceil_div(K, TILE_K) // MIN_SPLIT_TILES), 1)


def _large_tiles(M: int, N: int, device: DeviceInfo) -> Choice | None:
    """A tile of matmul_large.cu, where there are enough for half of the SMs.

    The one with the least time for the blocks that have most tiles, alone or in pairs on an SM.
    """
    if SPLIT_TILES[-1].rows >= M or 2 * ceil_div(M, 128) * ceil_div(N, 128) < device.num_sms:
        return None

    def time(of: tuple[LargeTile, int]) -> float:
        tile, per_sm = of
        waves = ceil_div(num_tiles(tile, M, N), per_sm * device.num_sms)
        return waves * LARGE_US[tile][per_sm - 1]

    fitting = [t for t in LARGE_US if t.smem <= device.smem_per_block]
    most = {t: min(_places(t, device) // device.num_sms, 2) for t in fitting}
    tile, per_sm = min(((t, n) for t in fitting for n in range(1, most[t] + 1)), key=time)
    smem = tile.smem if per_sm > 1 else _alone(tile, device)
    blocks = min(num_tiles(tile, M, N), per_sm * device.num_sms)
    return Choice(MATMUL_LARGE, tuple(tile), blocks, tile.threads, smem)


def _alone(tile: Tile | LargeTile, device: DeviceInfo) -> int:
    """Bytes of shared memory with which an SM has room for one block.

    Started early, blocks crowd onto the SMs that are free already, two or three on one, and the
    others stay idle (measured at batch 32: 1.96 instead of 1.26 ms a step).
    """
    return max(tile.smem, device.smem_per_block // 2 + 1024)


def _whole_tiles(M: int, N: int, device: DeviceInfo) -> Choice:
    """A tile of matmul.cu without split.

    Large tiles are faster each, but too few of them leave SMs idle. The estimated time is the
    number of tiles of the busiest SM times a tile's size by its speed; the larger tile wins ties.
    """

    def time(tile: Tile) -> float:
        waves = ceil_div(num_tiles(tile, M, N), device.num_sms)
        return waves * tile.rows * tile.cols / tile.speed

    tile = min(TILES, key=time)
    blocks = num_tiles(tile, M, N)
    one_wave = blocks <= device.num_sms
    smem = _alone(tile, device) if one_wave else tile.smem
    return Choice(MATMUL, tile[:5], blocks, tile.threads, smem, pdl=one_wave)
