import numpy as np
import pytest

from tinyvllm.memory.numpy_swapper import NumpySwapper
from tinyvllm.memory.swap_space import SwapSpace

SHAPE = (12, 2, 3)


@pytest.fixture
def kv_cache():
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def make_swapper(kv_cache, num_blocks=8, polls=2, per_slab=3):
    space = SwapSpace(num_blocks, kv_cache[0].nbytes)
    space.blocks_per_slab = per_slab
    swapper = NumpySwapper(space, polls)
    swapper.attach(kv_cache)
    return swapper


def test_blocks_come_back_bit_for_bit_in_other_places(kv_cache):
    swapper, before = make_swapper(kv_cache), kv_cache.copy()
    host = swapper.allocate(7)
    out = [3, 4, 5, 9, 0, 2, 1]
    swapper.swap_out(list(zip(out, host, strict=True))).wait()
    kv_cache[...] = -1
    back = [11, 10, 0, 1, 2, 7, 6]
    swapper.swap_in(list(zip(back, host, strict=True))).wait()
    np.testing.assert_array_equal(kv_cache[back], before[out])
    assert (np.delete(kv_cache, back, axis=0) == -1).all()
    assert swapper.stats.bytes_out == swapper.stats.bytes_in == 7 * kv_cache[0].nbytes
    assert len(swapper.slabs) == len(swapper.stats.stalls) == 3
    assert swapper.stats.plain_out_rate > 0


def test_copies_are_made_when_they_are_seen_done_and_in_order(kv_cache):
    swapper = make_swapper(kv_cache)
    (block,) = swapper.allocate(1)
    out = swapper.swap_out([(4, block)])
    back = swapper.swap_in([(5, block)])
    kv_cache[4] = 7
    assert np.isnan(kv_cache[5]).all(), "nothing has arrived"
    assert [out.done() for _ in range(2)] == [False, False]
    assert np.isnan(kv_cache[5]).all()
    back.wait()
    assert out.complete and (kv_cache[5] == 7).all(), "the one before comes first, and late"
    assert out.done() and back.done()


def test_slabs_come_with_the_first_block_that_needs_them(kv_cache):
    swapper = make_swapper(kv_cache)
    assert swapper.slabs == []
    assert swapper.allocate(2) == [0, 1] and len(swapper.slabs) == 1
    assert swapper.allocate(4) == [2, 3, 4, 5] and len(swapper.slabs) == 2
    assert swapper.allocate(3) is None and len(swapper.slabs) == 2
    swapper.reserve_all()
    assert [len(slab) for slab in swapper.slabs] == [3, 3, 2]
