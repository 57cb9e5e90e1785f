import random
from collections import Counter

import pytest

from tinyvllm.memory.swap_space import SLAB_BYTES, SwapSpace


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_match_a_naive_model(seed):
    rng = random.Random(seed)
    space = SwapSpace(rng.choice([1, 7, 60]), 8)
    users = Counter()
    held = []  # each entry: one user of each of these blocks
    for _ in range(300):
        choice = rng.random()
        if choice < 0.4:
            n = rng.randint(0, 12)
            blocks = space.allocate(n)
            num_free = space.num_blocks - len(users)
            assert (blocks is None) == (n > num_free)
            if blocks is not None:
                assert len(set(blocks)) == n and not users.keys() & set(blocks)
                users.update(blocks)
                held.append(blocks)
        elif held and choice < 0.6:
            blocks = rng.choice(held)
            space.incref(blocks)
            users.update(blocks)
            held.append(blocks)
        elif held:
            blocks = held.pop(rng.randrange(len(held)))
            space.free(blocks)
            users.subtract(blocks)
            users = +users
        assert (space.num_used, space.num_references) == (len(users), sum(users.values()))
        assert {i for i, used in enumerate(space.in_use()) if used} == users.keys()
        space.check_integrity()


def test_runs_are_kept_together_where_there_are_any():
    space = SwapSpace(20, 8)
    first = space.allocate(20)
    assert first == list(range(20))
    space.free([1, 3, 4, 10, 11, 12, 13, 14, 18])
    assert space.allocate(5) == [10, 11, 12, 13, 14], "the run, not the lowest"
    assert space.allocate(4) == [3, 4, 1, 18], "the longest that there is, then the rest"
    assert space.allocate(1) is None


def test_slabs_hold_64_mib_and_at_least_a_block():
    space = SwapSpace(300, 512 << 10)
    assert (space.blocks_per_slab, space.num_slabs) == (128, 3)
    assert [space.slab_blocks(i) for i in range(3)] == [128, 128, 44]
    assert SwapSpace(2, SLAB_BYTES + 1).num_slabs == 2


def test_a_space_that_shrinks_has_its_first_blocks_left():
    space = SwapSpace(10, 8)
    space.allocate(3)
    space.shrink(4)
    assert (space.num_free, space.num_used) == (1, 3)
    assert space.allocate(2) is None and space.allocate(1) == [3]
    with pytest.raises(AssertionError, match="in use"):
        space.shrink(2)
    space.check_integrity()


def test_damage_is_found():
    space = SwapSpace(10, 8)
    blocks = space.allocate(2)
    space._users[5] = 1
    with pytest.raises(RuntimeError, match="7 of 10 host blocks have no users; on record are 8"):
        space.check_integrity()
    space._users[5] = 0
    space.free(blocks)
    with pytest.raises(AssertionError, match="free already"):
        space.free(blocks)
