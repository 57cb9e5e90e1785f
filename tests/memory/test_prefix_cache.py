import random

import pytest

from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.prefix_cache import PrefixCache


def cache_sequence(cache, tokens):
    """Computes a sequence as a request alone would; returns its blocks, in use."""
    manager, size = cache.blocks, cache.blocks.block_size
    path = cache.lookup(tokens)
    tables = [[entry.blocks[group] for entry in path] for group in range(manager.num_groups)]
    for table in tables:
        manager.incref(table)
    entry = path[-1] if path else cache.root
    for start in range(len(path) * size, len(tokens) - size + 1, size):
        blocks = manager.allocate(manager.num_groups)
        assert blocks is not None
        entry = cache.extend(entry, tuple(tokens[start : start + size]), tuple(blocks))
        assert entry is not None
        for table, block in zip(tables, blocks, strict=True):
            table.append(block)
    return tables


def release(cache, tables):
    for table in tables:
        cache.blocks.free(reversed(table))


def test_longest_prefix_in_full_blocks_is_found():
    cache = PrefixCache(BlockManager(20, 2, num_groups=2))
    release(cache, cache_sequence(cache, [1, 2, 3, 4, 5]))
    cases = [([1], 0), ([1, 2], 1), ([1, 2, 3, 4], 2), ([1, 2, 3, 4, 5, 6], 2), ([3, 4], 0)]
    assert [len(cache.lookup(tokens)) for tokens, _ in cases] == [n for _, n in cases]
    assert all(len(entry.blocks) == 2 for entry in cache.lookup([1, 2, 3, 4]))


def test_equal_hashes_are_told_apart_by_the_tokens():
    modulus = (1 << 61) - 1  # of the hash of an int
    first, second = (7, 8), (7 + modulus, 8)
    assert hash(first) == hash(second)
    cache = PrefixCache(BlockManager(4, 2))
    (mine,) = cache_sequence(cache, first)
    assert cache.lookup(second) == []
    (other,) = cache_sequence(cache, second)
    assert mine != other
    assert [entry.blocks for entry in cache.lookup(first)] == [tuple(mine)]


def test_the_entry_that_is_there_first_stays():
    cache = PrefixCache(BlockManager(4, 1))
    mine, other = cache.blocks.allocate(1), cache.blocks.allocate(1)
    entry = cache.extend(cache.root, (1,), tuple(mine))
    assert cache.extend(cache.root, (1,), tuple(other)) is entry
    cache.blocks.free([*mine, *other])
    assert cache.blocks.num_cached == 1
    assert entry.blocks == tuple(mine)


def test_longest_unused_goes_first_and_ends_before_beginnings():
    cache = PrefixCache(BlockManager(4, 1))
    release(cache, cache_sequence(cache, [1, 2]))
    release(cache, cache_sequence(cache, [3, 4]))
    release(cache, cache_sequence(cache, [1]))  # used again, but not what follows
    found = []
    for n in range(1, 5):
        taken = cache.blocks.allocate(n)
        found.append([len(cache.lookup([1, 2])), len(cache.lookup([3, 4]))])
        cache.blocks.free(taken)
        cache.check_integrity()
    assert found == [[1, 2], [1, 1], [1, 0], [0, 0]]


def test_what_follows_an_evicted_block_goes_too_even_in_use():
    cache = PrefixCache(BlockManager(3, 1))
    (first,) = cache_sequence(cache, [1])
    own = cache.blocks.allocate(2)  # another sequence that computed 1 itself, and goes on with 2
    entry = cache.extend(cache.lookup([1])[0], (2,), (own[1],))
    cache.blocks.free(first)
    taken = cache.blocks.allocate(1)
    assert taken == first, "evicted"
    assert cache.lookup([1, 2]) == []
    assert cache.extend(entry, (3,), tuple(taken)) is None
    cache.check_integrity()
    cache.blocks.free([*own, *taken])
    assert cache.blocks.num_cached == 0
    cache.blocks.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_find_only_their_own_tokens(seed):
    rng = random.Random(seed)
    groups = rng.choice([1, 2])
    cache = PrefixCache(BlockManager(24 * groups, 2, groups))
    contents = {}  # block: (group, all tokens to its end)
    held = []
    for _ in range(500):
        if held and (len(held) == 3 or rng.random() < 0.5):
            release(cache, held.pop(rng.randrange(len(held))))
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(16))]
        found = len(cache.lookup(tokens))
        tables = cache_sequence(cache, tokens)
        for group, table in enumerate(tables):
            assert len(table) == len(tokens) // 2
            for i, block in enumerate(table):
                whole = (group, tokens[: 2 * i + 2])
                assert contents.get(block) == whole or i >= found
                contents[block] = whole
        held.append(tables)
        cache.check_integrity()
        cache.blocks.check_integrity()
    assert cache.blocks.num_cached


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.root.children.clear(), r"tree \[\], on record \[0, 1\], kept \[0, 1\]"),
        (lambda c: c.blocks.drop([0]), r"kept \[1\]"),
        (lambda c: setattr(c.lookup([1])[0], "tokens", (9,)), r"\(9,\) is filed under \(1,\)"),
    ],
)
def test_integrity_check_finds_damage(damage, message):
    cache = PrefixCache(BlockManager(3, 1))
    cache_sequence(cache, [1, 2])
    cache.check_integrity()
    damage(cache)
    with pytest.raises(RuntimeError, match=message):
        cache.check_integrity()
