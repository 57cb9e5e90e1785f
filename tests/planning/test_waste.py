"""KV memory lost in partly filled blocks, next to a count token by token."""

import pytest

from tinyvllm.bench.lengths import Lengths, exponential_lengths
from tinyvllm.config import BLOCK_SIZES
from tinyvllm.planning.waste import waste_by_block_size

LENGTHS = [Lengths(5, 20), Lengths(64, 1), Lengths(130, 40)]


def test_waste_is_what_counting_slots_gives():
    rows = waste_by_block_size(LENGTHS, kv_bytes=1 << 20, token_bytes=1024)
    assert [row.block_size for row in rows] == list(BLOCK_SIZES)
    for row in rows:
        size, empty, slots, blocks = row.block_size, 0, 0, 0
        for prompt, output in LENGTHS:
            for tokens in range(prompt, prompt + output):
                allocated = next(n for n in range(0, 1000, size) if n >= tokens)
                empty, slots = empty + allocated - tokens, slots + allocated
            blocks += (prompt + output + size - 1) // size
        assert row.wasted == pytest.approx(empty / slots)
        assert row.sequences == (1024 // size) * 3 // blocks


def test_small_blocks_waste_less():
    wasted = [
        row.wasted for row in waste_by_block_size(exponential_lengths(512), 1 << 30, 32 << 10)
    ]
    assert wasted == sorted(wasted)
    assert wasted[BLOCK_SIZES.index(16)] < 0.04
