import random

import pytest

from tinyvllm.memory.blocks import CACHED, FREE, IN_USE, BlockManager
from tinyvllm.util import InputError


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_match_naive_model(seed):
    rng = random.Random(seed)
    num_blocks = rng.choice([1, 2, 7, 40])
    manager = BlockManager(num_blocks, 16)
    counts: dict[int, int] = {}  # the naive model: block -> users
    kept: set[int] = set()
    cached: list[int] = []  # the oldest first
    users: list[list[int]] = []  # each holds one reference to each of its blocks
    for _ in range(2000):
        action = rng.choice(["allocate", "allocate", "share", "free", "keep", "drop", "revive"])
        if action == "allocate":
            n = rng.randrange(6)
            taken = manager.allocate(n)
            if n > num_blocks - len(counts):
                assert taken is None
            else:
                assert taken is not None
                assert len(set(taken)) == n
                assert all(0 <= block < num_blocks for block in taken)
                assert not counts.keys() & set(taken), "a block in use was handed out"
                evicted = max(0, n - (num_blocks - len(counts) - len(cached)))
                assert set(cached) & set(taken) <= set(cached[:evicted]), "the oldest go first"
                kept -= set(cached[:evicted])
                del cached[:evicted]
                counts.update(dict.fromkeys(taken, 1))
                users.append(taken)
        elif action == "share" and users:
            blocks = rng.choice(users)
            part = blocks[: rng.randrange(len(blocks) + 1)]
            manager.incref(part)
            for block in part:
                counts[block] += 1
            users.append(part)
        elif action == "revive" and cached:
            block = cached.pop(rng.randrange(len(cached)))
            manager.incref([block])
            counts[block] = 1
            users.append([block])
        elif action == "keep" and users:
            manager.keep(blocks := rng.choice(users))
            kept.update(blocks)
        elif action == "drop" and kept:
            block = rng.choice(sorted(kept))
            manager.drop([block])
            kept.remove(block)
            if block in cached:
                cached.remove(block)
        elif users:
            blocks = users.pop(rng.randrange(len(users)))
            manager.free(blocks)
            for block in blocks:
                counts[block] -= 1
                if counts[block] == 0:
                    del counts[block]
                    if block in kept:
                        cached.append(block)
        assert manager.num_used == len(counts)
        assert manager.num_free == num_blocks - len(counts)
        assert manager.num_cached == len(cached)
        assert manager.usage == len(counts) / num_blocks
        assert [manager.ref_count(b) for b in range(num_blocks)] == [
            counts.get(b, 0) for b in range(num_blocks)
        ]
        assert {b for b in range(num_blocks) if manager.is_kept(b)} == kept
        assert manager.states().tolist() == [
            IN_USE if b in counts and b not in cached else CACHED if b in cached else FREE
            for b in range(num_blocks)
        ]
        manager.check_integrity()
    for blocks in users:
        manager.free(blocks)
    assert manager.num_free == num_blocks


def test_allocation_is_all_or_nothing():
    manager = BlockManager(3, 16)
    assert manager.allocate(4) is None
    assert manager.num_free == 3
    assert manager.allocate(0) == []
    assert manager.num_free == 3
    assert manager.allocate(3) == [0, 1, 2]
    assert manager.allocate(1) is None


def test_sizes_count_all_groups():
    manager = BlockManager(9, 16, num_groups=2)
    assert [manager.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 2, 2, 4]
    assert manager.max_tokens == 4 * 16  # the ninth block has no partner
    assert manager.blocks_for(manager.max_tokens) <= 9 < manager.blocks_for(manager.max_tokens + 1)


def test_misuse_is_caught():
    manager = BlockManager(4, 16)
    with pytest.raises(AssertionError, match="block 2 is free already"):
        manager.free([2])
    with pytest.raises(AssertionError, match="block 2 is free"):
        manager.incref([2])
    with pytest.raises(AssertionError, match="block 2 is not in use"):
        manager.keep([2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m._free.append(m._free[0]), r"blocks \[4\] are more than once among 4 free"),
        (
            lambda m: m._free.pop(),
            r"2 free \+ 1 cached \+ 1 in use = 4 blocks, but the cache has 5",
        ),
        (lambda m: m._counts.__setitem__(0, -1), r"negative reference counts: \{0: -1\}"),
        (lambda m: m._kept.__setitem__(3, 1), r"kept but free: \{3\}"),
        (lambda m: m._kept.__setitem__(1, 0), r"cached but not kept: \{1\}"),
        (lambda m: m._counts.__setitem__(3, 2), r"free or cached blocks with users .*\{3: 2\}"),
    ],
)
def test_integrity_check_finds_damage(damage, message):
    manager = BlockManager(5, 16)
    manager.allocate(2)
    manager.keep([1])
    manager.free([1])
    manager.check_integrity()
    damage(manager)
    with pytest.raises(RuntimeError, match=message):
        manager.check_integrity()


@pytest.mark.parametrize("sizes", [(0, 16, 1), (4, 0, 1), (4, 16, 0), (1, 16, 2)])
def test_impossible_sizes(sizes):
    with pytest.raises(InputError, match=f"{sizes[0]} blocks of {sizes[1]} tokens"):
        BlockManager(*sizes)
