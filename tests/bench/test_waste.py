"""The waste of KV memory, by simulation."""

import itertools

import pytest

from tinyvllm.bench.lengths import Lengths, exponential_lengths
from tinyvllm.bench.waste import simulate_waste

SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}


def test_waste_of_one_request_by_hand():
    """6 tokens in, 4 out, blocks of 8: after the prompt 2 places are empty, then 1, 0, and 7."""
    found = simulate_waste([Lengths(6, 4)], 8, **SIZES)
    assert found.waste == (2 + 1 + 0 + 7) / (8 + 8 + 8 + 16)
    assert (found.peak_blocks, found.table_entries, found.table_bytes) == (2, 2, 2 * 4 * 64)


def test_waste_at_block_16_is_at_most_2_per_cent_of_the_lengths_of_conversations():
    """The PagedAttention paper: under 4 %."""
    found = simulate_waste(exponential_lengths(400), 16, **SIZES)
    assert 0.005 < found.waste <= 0.02


def test_waste_grows_with_the_block_and_tables_shrink():
    lengths = exponential_lengths(60)
    found = [simulate_waste(lengths, size, **SIZES) for size in (8, 16, 32, 64)]
    for small, large in itertools.pairwise(found):
        assert large.waste == pytest.approx(2 * small.waste, rel=0.25)
        assert large.table_bytes <= small.table_bytes / 2 + 4 * 64
