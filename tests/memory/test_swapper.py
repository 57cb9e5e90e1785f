import itertools
import random

import pytest

from tinyvllm.memory.swapper import SwapStats, merge_runs


@pytest.mark.parametrize(
    ("pairs", "pieces"),
    [
        ([], []),
        ([(5, 0)], [(5, 0, 1)]),
        ([(5, 0), (6, 1), (7, 2)], [(5, 0, 3)]),
        ([(5, 0), (6, 2)], [(5, 0, 1), (6, 2, 1)]),
        ([(5, 0), (7, 1)], [(5, 0, 1), (7, 1, 1)]),
        ([(6, 1), (5, 0)], [(6, 1, 1), (5, 0, 1)]),
        ([(5, 2), (6, 3), (7, 4), (8, 5)], [(5, 2, 2), (7, 4, 2)]),  # slabs of 4
    ],
)
def test_neighbours_on_both_sides_are_one_piece(pairs, pieces):
    assert merge_runs(pairs, 4) == pieces


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_pairs_and_none_could_be_longer(seed):
    rng = random.Random(seed)
    per_slab = rng.choice([1, 3, 8])
    device, host, pairs = 0, 0, []
    for _ in range(60):
        device += rng.choice([1, 1, 1, 2])
        host += rng.choice([1, 1, 1, 3])
        pairs.append((device, host))
    pieces = merge_runs(pairs, per_slab)
    assert [(d + i, h + i) for d, h, n in pieces for i in range(n)] == pairs
    for _, h, n in pieces:
        assert h // per_slab == (h + n - 1) // per_slab
    for (d, h, n), (next_d, next_h, _) in itertools.pairwise(pieces):
        assert (d + n, h + n) != (next_d, next_h) or next_h % per_slab == 0


def test_statistics_add_up_each_way():
    stats = SwapStats()
    stats.count(10, 0.5, out=True)
    stats.count(7, 0.25, out=False)
    stats.count(10, 0.5, out=True)
    assert (stats.bytes_out, stats.seconds_out) == (20, 1.0)
    assert (stats.bytes_in, stats.seconds_in) == (7, 0.25)
