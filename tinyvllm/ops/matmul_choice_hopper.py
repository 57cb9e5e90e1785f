"""The tile of matmul_hopper.cu for a product, by an estimate of its time, and its launch.

A block's products follow each other, and wait for data: by its own pipeline, or by L2, which serves
all SMs. Before a tile's products data is on its way and after them sums are stored; consumers that
alternate do that while the others multiply.
"""

from __future__ import annotations

from functools import lru_cache

from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.ops.matmul_kernels import MATMUL_HOPPER, Choice
from tinyvllm.ops.matmul_tiles import (
    HOPPER_LARGE,
    HOPPER_LARGE_ROWS,
    HOPPER_MIDDLE,
    HOPPER_MIDDLE_US,
    HOPPER_US,
    MAX_CLUSTERED,
    MIN_SPLIT_TILES,
    TILE_K,
    HopperTile,
    num_tiles,
)
from tinyvllm.util import align_up, ceil_div

HOPPER_EDGES = 2.0  # us until a tile's products run, and from their end until it is stored
HOPPER_NARROW = 64  # rows and columns: with as few rows memory decides, and no wider tile won
HOPPER_CLUSTERED = 512  # up to as many rows clusters that share weights were faster
HOPPER_MEETING = 0.5  # us that blocks wait for each other's start in a cluster
HOPPER_L2 = 10.5e6  # bytes that tiles load from L2 in a us
# Where a block has all of K, and two stages are loaded together, or HOPPER_MIDDLE many rows.
HOPPER_L2_WHOLE = 13e6


def hopper_choice(
    tile: HopperTile, split: int, M: int, N: int, device: DeviceInfo, *, silu: bool = False
) -> Choice:
    """A launch of matmul_hopper.cu: a block for each tile and part of K, or blocks that stay."""
    assert split <= tile.max_split
    together = tile.cluster * split
    clusters = num_tiles(tile, M, N) // tile.cluster
    if split == 1:
        clusters = min(clusters, device.num_sms // tile.cluster)
    return Choice(
        MATMUL_HOPPER,
        (*tile, split > 1),
        clusters * together,
        tile.threads(split),
        tile.smem(split),
        split,
        cluster=together,
        boxes=(tile.rows, tile.cols // tile.cluster),
        piece=tile.piece(silu),
    )


def _hopper_splits(tile: HopperTile, M: int, N: int, K: int, device: DeviceInfo) -> list[int]:
    """Over how many blocks K may be shared out: those of a cluster that finds its places."""
    tiles = num_tiles(tile, M, N)
    most = max(min(tile.max_split, ceil_div(K, TILE_K) // MIN_SPLIT_TILES), 1)
    clustered = int(MAX_CLUSTERED * device.num_sms)
    # Pairs find them on all SMs, and three fives in each part of the chip, of 16 or 18 SMs.
    places = {1: 1 << 31, 2: device.num_sms, 5: device.num_sms * 5 // 6}
    return [
        s
        for s in range(1, most + 1)
        if tiles * s <= places.get(s, clustered) and tile.smem(s) <= device.smem_per_block
    ]


@lru_cache(4096)
def hopper_tile(
    M: int, N: int, K: int, device: DeviceInfo, silu: bool, head_dim: int = 0
) -> tuple[HopperTile, int]:
    """The tile and split of K with the least estimated time; with `head_dim`, those whose sums of a
    head are all in one thread block.
    """
    if M >= HOPPER_LARGE_ROWS and N % HOPPER_LARGE.cols == 0:
        return HOPPER_LARGE, 1

    middle = M in HOPPER_MIDDLE
    tile_us = HOPPER_US | HOPPER_MIDDLE_US if middle else HOPPER_US

    def time(of: tuple[HopperTile, int]) -> float:
        tile, split = of
        tiles = num_tiles(tile, M, N)
        waves = ceil_div(tiles * split, device.num_sms)
        products = waves * tile_us[tile][silu] * K / 2048 / split
        edges = HOPPER_EDGES * (1 if tile.alternate else waves)
        fast = split == 1 and (middle or (tile.boxes == 2 and tile.cluster == 1))
        speed = HOPPER_L2_WHOLE if fast else HOPPER_L2
        loaded = tiles * (tile.rows + tile.cols / tile.cluster) * K * 2
        summed = 1 + 0.4 * split + tile.rows * tile.cols / 4000 if split > 1 else 0.0
        if tile.cluster > 1:
            edges += HOPPER_MEETING
        return edges + max(products, loaded / speed) + summed

    def fits(tile: HopperTile) -> bool:
        if head_dim and (tile.cols % head_dim or tile.smem(1) > device.smem_per_block):
            return False
        if M <= HOPPER_NARROW < tile.cols:
            return False
        rows = tile.rows * tile.cluster
        if tile.cluster > 1:  # no block without rows, which is slower than one with
            return M <= HOPPER_CLUSTERED and align_up(M, rows) < M + 64
        return rows < M + 64  # no warpgroup

    tiles = [t for t in tile_us if fits(t)]
    if head_dim:  # three consumers have no registers to spare for sines
        tiles = [t for t in tiles if t.consumers < 3]
        return min(((t, 1) for t in tiles), key=time)
    return min(((t, s) for t in tiles for s in _hopper_splits(t, M, N, K, device)), key=time)
