"""Which kernel and tile a product gets, and that every choice is one the device can launch."""

import re
from dataclasses import replace

import pytest

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.ops import matmul_tiles
from tinyvllm.ops.matmul_choice import choose, choose_rope
from tinyvllm.ops.matmul_choice_hopper import _hopper_splits
from tinyvllm.ops.matmul_kernels import (
    MATMUL,
    MATMUL_FEW_ROWS,
    MATMUL_HOPPER,
    MATMUL_LARGE,
    MATMUL_WIDE,
)
from tinyvllm.ops.matmul_tiles import (
    FEW_ROWS,
    FEW_ROWS_COLS,
    FEW_ROWS_MAX,
    FEW_ROWS_STEP,
    HOPPER_TILES,
    LARGE_US,
    SPLIT_TILES,
    TILES,
    WIDE_TILES,
)

H200 = DeviceInfo("H200", (9, 0), 132, 227 << 10, 140 << 30, "hopper")
PORTABLE = replace(H200, kernel_path="portable")
A100 = DeviceInfo("A100", (8, 0), 108, 163 << 10, 80 << 30)
L40S = DeviceInfo("L40S", (8, 9), 142, 99 << 10, 48 << 30)
RTX = DeviceInfo("RTX 5090", (12, 0), 170, 99 << 10, 32 << 30)
DEVICES = [H200, PORTABLE, A100, L40S, RTX]

SHAPES = [(1, 8), (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048), (49, 40)]
ROWS = [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 8192]


def tile_of(choice):
    """Rows of x and columns that a block, or a cluster that shares weights, computes."""
    if choice.kernel is MATMUL_FEW_ROWS:
        return FEW_ROWS_MAX, FEW_ROWS_COLS
    if choice.kernel is MATMUL_HOPPER:
        *tile, split = choice.template
        tile = matmul_tiles.HopperTile(*tile)
        assert split == (choice.split > 1) and choice.cluster == tile.cluster * choice.split
        assert choice.boxes == (tile.rows, tile.cols // tile.cluster)
        return tile.rows * tile.cluster, tile.cols
    rows, cols, *_ = choice.template
    return rows, 64 if choice.kernel is MATMUL_WIDE else cols


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: f"{d.name}-{d.kernel_path}")
@pytest.mark.parametrize("N, K", SHAPES)
def test_every_choice_covers_the_result_and_fits_the_device(N, K, device):
    for M in ROWS:
        for silu in (False, True):
            choice = choose(M, N, K, device, silu=silu)
            rows, cols = tile_of(choice)
            tiles = -(-M // rows) * -(-N // cols)
            if choice.kernel is MATMUL_HOPPER and choice.split == 1:
                tiles = min(tiles, device.num_sms // choice.cluster) * choice.cluster
            if choice.kernel is MATMUL_LARGE:
                per_sm = (device.smem_per_block + 1024) // (choice.smem + 1024)
                tiles = min(tiles, min(per_sm, 2) * device.num_sms)  # blocks that stay
            assert choice.blocks == tiles * choice.split
            assert choice.kernel not in (MATMUL_FEW_ROWS, MATMUL_WIDE) or rows >= M
            assert choice.smem <= device.smem_per_block and choice.threads <= 512
            if choice.kernel in (MATMUL_WIDE, MATMUL_HOPPER):
                assert device.kernel_path == "hopper"


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: f"{d.name}-{d.kernel_path}")
def test_split_only_in_clusters_that_all_run_at_once(device):
    for M in ROWS:
        for N, K in SHAPES:
            choice = choose(M, N, K, device)
            assert 1 <= choice.split <= min(8, -(-K // 64))
            if choice.split > 1:
                assert device.compute_capability >= (9, 0)
                per_sm = (device.smem_per_block + 1024) // (choice.smem + 1024)
                hopper = choice.kernel is MATMUL_HOPPER
                share = {2: 1, 5: 5 / 6}.get(choice.split, 0.75) if hopper else 0.75
                assert choice.blocks <= share * per_sm * device.num_sms


@pytest.mark.parametrize(
    "M, N, K, tile, split",
    [
        (3, 2048, 8192, (16, 64), 5),
        (8, 3072, 2048, (16, 64), 4),
        (8, 16384, 2048, (16, 64), 1),
        (16, 3072, 2048, (16, 64), 4),
        (32, 2048, 2048, (32, 64), 4),
    ],
)
def test_choices_for_few_rows_on_hopper_are_those_that_were_measured_to_win(M, N, K, tile, split):
    choice = choose(M, N, K, H200)
    assert (choice.kernel, tile_of(choice), choice.split) == (MATMUL_WIDE, tile, split)


@pytest.mark.parametrize(
    "M, N, K, tile, split",
    [
        (33, 128256, 2048, (64, 64), 1),
        (64, 3072, 2048, (64, 64), 1),
        (64, 2048, 2048, (64, 64), 3),
        (64, 16384, 2048, (64, 64), 1),
        (64, 2048, 8192, (64, 64), 3),
        (65, 3072, 2048, (2 * 64, 64), 1),
        (128, 3072, 2048, (2 * 64, 64), 1),
        (128, 2048, 2048, (2 * 64, 64), 1),
        (128, 16384, 2048, (128, 128), 1),
        (97, 2048, 8192, (128, 96), 5),
        (128, 2048, 8192, (128, 96), 5),
        (129, 3072, 2048, (64, 96), 1),
        (192, 3072, 2048, (64, 96), 1),
        (192, 2048, 2048, (64, 64), 1),
        (192, 16384, 2048, (192, 128), 1),
        (192, 128256, 2048, (192, 128), 1),
        (192, 2048, 8192, (192, 96), 5),
        (193, 3072, 2048, (2 * 64, 128), 1),
        (256, 3072, 2048, (2 * 64, 128), 1),
        (256, 2048, 2048, (64, 64), 1),
        (256, 16384, 2048, (2 * 128, 256), 1),
        (256, 128256, 2048, (128, 128), 1),
        (193, 2048, 8192, (2 * 64, 64), 1),
        (256, 2048, 8192, (2 * 64, 64), 1),
        (320, 3072, 2048, (64, 128), 1),
        (320, 2048, 8192, (64, 96), 1),
        (384, 3072, 2048, (128, 96), 1),
        (384, 2048, 2048, (64, 128), 1),
        (512, 3072, 2048, (128, 96), 1),
        (512, 2048, 2048, (128, 64), 1),
        (512, 2048, 8192, (2 * 64, 128), 1),
        (512, 16384, 2048, (128, 128), 1),
        (576, 16384, 2048, (192, 128), 1),
        (640, 3072, 2048, (128, 128), 1),
        (640, 2048, 2048, (128, 96), 1),
        (640, 2048, 8192, (128, 96), 1),
        (1024, 3072, 2048, (128, 192), 1),
        (1024, 2048, 2048, (128, 128), 1),
        (1024, 16384, 2048, (128, 128), 1),
        (1024, 2048, 8192, (128, 128), 1),
        (8192, 3072, 2048, (2 * 128, 256), 1),
        (8192, 2048, 2048, (2 * 128, 256), 1),
        (8192, 16384, 2048, (2 * 128, 256), 1),
        (8192, 2048, 8192, (2 * 128, 256), 1),
        (8192, 576, 2048, (128, 128), 1),
    ],
)
def test_choices_on_hopper_are_those_that_were_measured_to_win(M, N, K, tile, split):
    choice = choose(M, N, K, H200, silu=N == 16384)
    assert (choice.kernel, tile_of(choice), choice.split) == (MATMUL_HOPPER, tile, split)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 33), (128, 65), (96, None)])
def test_rope_is_part_of_the_product_where_tiles_of_hopper_have_whole_heads(head_dim, rows):
    for M in (1, 32, 33, 64, 65, 8192):
        choice = choose_rope(M, 3072, 2048, head_dim, H200)
        assert (choice is not None) == (rows is not None and rows <= M)
        assert choice is None or choice.boxes[1] * choice.cluster % head_dim == 0
        assert not any(choose_rope(M, 3072, 2048, head_dim, device) for device in DEVICES[1:])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_products_with_rope_walk_as_many_rows_as_without_a_cluster(head_dim):
    choice = choose_rope(8192, 3072, 2048, head_dim, H200)
    tile = matmul_tiles.HopperTile(*choice.template[:-1])
    assert (tile.rows, tile.cols, tile.cluster, choice.group) == (128, 256, 2, 8)
    small = choose_rope(1024, 3072, 2048, 64, H200)
    assert (*small.boxes, small.cluster, small.group) == (128, 192, 1, 16)


@pytest.mark.parametrize(
    "tiles, K, splits",
    [
        (16, 8192, [1, 2, 3, 4, 5, 6]),  # 99 of 132 SMs for clusters, but pairs and fives
        (17, 8192, [1, 2, 3, 4, 5]),
        (22, 8192, [1, 2, 3, 4, 5]),  # 110, the most for fives
        (23, 8192, [1, 2, 3, 4]),
        (24, 8192, [1, 2, 3, 4]),  # 96
        (25, 8192, [1, 2, 3]),
        (33, 8192, [1, 2, 3]),
        (34, 8192, [1, 2]),
        (66, 8192, [1, 2]),
        (67, 8192, [1]),
        (16, 3 * 512, [1, 2, 3]),  # 512 elements of K, 8 stages, for each
        (16, 3 * 512 - 64, [1, 2]),
        (16, 40, [1]),
    ],
)
def test_k_is_split_over_clusters_that_find_their_places(tiles, K, splits):
    tile = matmul_tiles.HopperTile(1, 1, 64, 12)
    assert _hopper_splits(tile, 64, 64 * tiles, K, H200) == splits


def test_no_block_of_a_cluster_that_shares_weights_is_without_rows():
    seen = set()
    for M in range(33, 1100, 3):
        for N, K in SHAPES[1:]:
            for choice in (choose(M, N, K, H200), choose_rope(M, N, K, 64, H200)):
                if choice is None or choice.split > 1 or choice.cluster == 1:
                    continue
                assert -(-M // choice.boxes[0]) % choice.cluster == 0
                seen.add(choice.boxes)
    assert len(seen) > 1


@pytest.mark.parametrize("M, N, tile", [(16, 3072, (16, 64)), (33, 2048, (64, 64))])
def test_few_rows_are_split_on_the_portable_path_too(M, N, tile):
    choice = choose(M, N, 2048, PORTABLE)
    assert (choice.kernel, tile_of(choice), choice.split) == (MATMUL, tile, 4)
    assert choose(M, N, 2048, A100).split == 1


@pytest.mark.parametrize("device", [PORTABLE, *(replace(d, num_sms=132) for d in (A100, L40S))])
@pytest.mark.parametrize(
    "M, N, kernel, tile",
    [
        (65, 2048, MATMUL, (32, 64)),
        (128, 2048, MATMUL, (32, 64)),
        (128, 16384, MATMUL_LARGE, (128, 128)),
        (256, 2048, MATMUL, (64, 64)),  # 128 tiles for 132 SMs; of 128 x 128 there would be 32
        (256, 16384, MATMUL_LARGE, (256, 128)),
        (512, 2048, MATMUL, (64, 64)),
        (512, 3072, MATMUL_LARGE, (128, 128)),
        (1024, 2048, MATMUL_LARGE, (128, 128)),
        (1024, 3072, MATMUL_LARGE, (128, 192)),
        (1024, 16384, MATMUL_LARGE, (256, 128)),
        (8192, 2048, MATMUL_LARGE, (256, 128)),
        (8192, 16384, MATMUL_LARGE, (256, 128)),
    ],
)
def test_tiles_without_clusters_fill_the_card(device, M, N, kernel, tile):
    choice = choose(M, N, 2048, device)
    assert (choice.kernel, tile_of(choice), choice.split) == (kernel, tile, 1)


def test_a_wave_of_blocks_has_each_an_sm_of_its_own():
    for device in DEVICES[1:]:
        for M, N, K in ((128, 2048, 2048), (512, 3072, 2048), (1024, 2048, 8192)):
            choice = choose(M, N, K, device)
            if choice.blocks <= device.num_sms:
                assert 2 * (choice.smem + 1024) > device.smem_per_block + 1024


@pytest.mark.parametrize("M, N", [(16, 128256), (64, 128256), (1, 128256)])
def test_more_blocks_than_sms_share_them(M, N):
    """They ask for no more shared memory than they use, unlike those of a single wave."""
    choice = choose(M, N, 2048, A100)
    assert choice.blocks > A100.num_sms
    if M == 1:
        warps, _ = choice.template
        assert choice.kernel is MATMUL_FEW_ROWS and choice.threads == 32 * warps
        return
    assert choice.kernel is MATMUL and not choice.pdl
    rows, cols, warps_m, warps_n, stages = choice.template
    assert choice.threads == 32 * warps_m * warps_n
    assert choice.smem == stages * (rows + cols) * 64 * 2


@pytest.mark.parametrize("tile", LARGE_US)
def test_large_tiles_fit_fragments_and_shared_memory(tile):
    assert tile.rows % (16 * tile.warps_m) == 0
    assert tile.cols % (32 * tile.warps_n) == 0  # results of the SiLU product: 16 columns or more
    assert tile.smem <= 163 << 10
    small = 99 << 10  # what a block may have on sm_86, sm_89 and sm_120
    assert any(t[:4] == tile[:4] and t.smem <= small for t in LARGE_US)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: f"{d.name}-{d.kernel_path}")
def test_few_rows_kernel_for_one_and_two_rows(device):
    for N, K in SHAPES:
        rows = [M for M in ROWS if choose(M, N, K, device).kernel is MATMUL_FEW_ROWS]
        assert rows == [1, 2]
    deep = 1 << 18  # no room for x
    assert choose(1, 2048, deep, device).kernel is not MATMUL_FEW_ROWS


@pytest.mark.parametrize(
    "N, K, warps, ring",
    [
        (3072, 2048, 8, 6),
        (2048, 2048, 8, 16),
        (16384, 2048, 4, 8),
        (2048, 8192, 8, 16),
        (128256, 2048, 4, 8),
    ],
)
def test_few_rows_choices_are_those_that_were_measured_to_win(N, K, warps, ring):
    for M in (1, 2):
        assert choose(M, N, K, H200).template == (warps, ring)


@pytest.mark.parametrize("tile", {*TILES, *SPLIT_TILES})
def test_tiles_fit_fragments_and_shared_memory(tile):
    assert tile.rows % (16 * tile.warps_m) == 0 and tile.cols % (16 * tile.warps_n) == 0
    assert tile.smem <= 99 << 10  # what a block may have on sm_86, sm_89 and sm_120
    assert tile.rows * (tile.cols + 8) * 4 <= tile.smem  # the sums go through it


@pytest.mark.parametrize("tile", WIDE_TILES)
def test_wide_tiles_fit_shared_memory_twice(tile):
    assert 2 * (tile.smem + 1024) <= 228 << 10
    assert tile.rows * (tile.cols + 4) * 4 <= tile.smem


@pytest.mark.parametrize("tile", HOPPER_TILES)
def test_hopper_tiles_fit_shared_memory(tile):
    splits = [s for s in range(1, tile.max_split + 1) if tile.smem(s) <= 227 << 10]
    assert splits and splits[-1] == tile.max_split
    for split in range(2, tile.max_split + 1):  # each rank's rows of all sums go through the stages
        groups = -(-tile.rows // 8 // split)
        assert split * groups * 8 * tile.cols * 4 <= tile.stages * (tile.rows + tile.cols) * 128


def test_tiles_of_a_cluster_copy_whole_swizzle_atoms_of_the_weights_they_share():
    for tile in HOPPER_TILES:
        assert tile.cols % (8 * tile.cluster) == 0


def test_consumers_alternate_only_where_they_have_tiles_to_alternate():
    """A block's second consumer begins with its second tile."""
    for M in (128, 512, 1024, 8192):
        for N, K in SHAPES:
            choice = choose(M, N, K, H200)
            if (
                choice.kernel is MATMUL_HOPPER
                and matmul_tiles.HopperTile(*choice.template[:-1]).alternate
            ):
                rows, cols = tile_of(choice)
                assert -(-M // rows) * -(-N // cols) > choice.blocks


def test_constants_agree_with_the_kernels():
    def constant(file, name):
        text = (cuda_src_dir() / file).read_text()
        return re.search(rf"constexpr int {name} = ([^;]+);", text)[1]

    few, hopper = "matmul_few_rows.cu", "matmul_hopper.cu"
    assert int(constant(few, "kTileCols")) == FEW_ROWS_COLS
    assert int(constant(few, "kStepK")) == FEW_ROWS_STEP
    assert int(constant(few, "kMaxRows")) == FEW_ROWS_MAX
    assert constant(few, "kStepBytes") == "2 * 16 * kWarpSize"  # 1 KiB
    for one in FEW_ROWS:
        assert one.blocks_per_sm == int(constant(few, "kRingsPerSm")) // (one.warps * one.ring)
    assert int(constant("include/matmul_tile.cuh", "kTileK")) == matmul_tiles.TILE_K
    assert "return rows * cols <= 64 * 64 ? 2 : 1;" in (cuda_src_dir() / hopper).read_text()
    pairs = [t for t in HOPPER_TILES if t.boxes == 2]
    assert pairs and all(t.stages % 2 == 0 for t in pairs)
    most = max(t.max_split for t in (*TILES, *WIDE_TILES, *HOPPER_TILES))
    assert int(constant("include/cluster.cuh", "kMaxCluster")) >= most
