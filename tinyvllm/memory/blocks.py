"""Which KV-cache blocks are free and how many users each of the others has; pure bookkeeping."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np

from tinyvllm.util import InputError, ceil_div

# What `BlockManager.states` says of a block.
FREE, CACHED, IN_USE = range(3)


class BlockManager:
    """Free list and reference counts of the blocks 0 .. num_blocks - 1.

    A block holds `block_size` tokens of one KV group (a set of layers that share a block table).
    The groups draw from one pool, so a sequence of n tokens takes
    `num_groups * ceil(n / block_size)` blocks.

    A block's life, with its reference count over each interval:

        free      count 0         in the free list, contents meaningless
        in use    count 1         from `allocate` to the last `free`; its one user may write,
                                  until `keep`
        shared    count 2 or more from `incref` until `free` leaves one user; nobody may write
        cached    count 0         kept at its last `free`: contents stay until `incref` brings it
                                  back, or `allocate` runs out of free blocks and evicts it

    Cached blocks are not in use: `num_free` counts them, since `allocate` can hand them out. It
    evicts the one that lost its last user first.

    The caller decides when a freed block may be written again: work queued earlier on the compute
    stream may still read it, work queued later on that stream may overwrite it.
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        if block_size < 1 or num_groups < 1 or num_blocks < num_groups:
            raise InputError(
                f"KV cache of {num_blocks} blocks of {block_size} tokens for {num_groups} groups: "
                "there must be at least one block a group, and one token a block"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_groups = num_groups
        # Both are plain memory, so that `states` reads them as arrays, whatever their size.
        self._counts = array("i", bytes(4 * num_blocks))
        self._kept = bytearray(num_blocks)  # 1: in use or cached
        # A stack: the block freed last is allocated first; at the start, block 0 is on top.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # the kept ones without users, the oldest first
        # Called with the cached block to evict; must `drop` it, and may drop others.
        self.evict: Callable[[int], None] = lambda block: self.drop([block])

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included, from 0 to num_blocks."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without users whose contents are kept."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one user."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, from 0 to 1."""
        return self.num_used / self.num_blocks

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence can store when it has the whole cache."""
        return self.num_blocks // self.num_groups * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that hold `num_tokens` tokens of one sequence."""
        return self.num_groups * ceil_div(num_tokens, self.block_size)

    def ref_count(self, block: int) -> int:
        """Users of a block."""
        return self._counts[block]

    def allocate(self, n: int) -> list[int] | None:
        """Take n free blocks with count 1 each; None, and nothing taken, when fewer are free."""
        if n > self.num_free:
            return None
        while len(self._free) < n:
            self.evict(next(iter(self._cached)))
        rest = len(self._free) - n
        taken = self._free[rest:]
        del self._free[rest:]
        taken.reverse()
        for block in taken:
            self._counts[block] = 1
        return taken

    def incref(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks, which must be in use or cached."""
        for block in blocks:
            if self._counts[block] == 0:
                assert block in self._cached, f"block {block} is free: it cannot be shared"
                del self._cached[block]
            self._counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take a user from each of these blocks; one without users left is free, or cached."""
        for block in blocks:
            count = self._counts[block] - 1
            assert count >= 0, f"block {block} is free already"
            self._counts[block] = count
            if count == 0:
                if self._kept[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, blocks: Iterable[int]) -> None:
        """From now on nobody writes these blocks, in use now; their last `free` caches them."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is not in use: nothing to keep"
            self._kept[block] = 1

    def drop(self, blocks: Iterable[int]) -> None:
        """The contents of these kept blocks are not needed any more: cached ones become free."""
        for block in blocks:
            assert self._kept[block], f"block {block} is not kept"
            self._kept[block] = 0
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def is_kept(self, block: int) -> bool:
        """True from `keep` to `drop`."""
        return bool(self._kept[block])

    def states(self) -> np.ndarray:
        """FREE, CACHED or IN_USE for each block: uint8 [num_blocks], in about 0.1 ms."""
        in_use = np.frombuffer(self._counts, np.intc) > 0
        return np.where(in_use, np.uint8(IN_USE), np.frombuffer(self._kept, np.uint8))

    def check_integrity(self) -> None:
        """Raise RuntimeError, with the numbers, unless each block is free, cached or in use."""
        free, counts, cached = self._free, self._counts, self._cached
        negative = {block: count for block, count in enumerate(counts) if count < 0}
        if negative:
            raise RuntimeError(f"negative reference counts: {negative}")
        if len(set(free)) != len(free):
            twice = sorted({block for block in free if free.count(block) > 1})
            raise RuntimeError(f"blocks {twice} are more than once among {len(free)} free ones")
        referenced = {block: counts[block] for block in [*free, *cached] if counts[block] > 0}
        if referenced:
            raise RuntimeError(f"free or cached blocks with users (block: count): {referenced}")
        kept_free = {block for block in free if self._kept[block]}
        not_kept = {block for block in cached if not self._kept[block]}
        if kept_free or not_kept:
            raise RuntimeError(
                f"blocks kept but free: {kept_free}, cached but not kept: {not_kept}"
            )
        in_use = sum(1 for count in counts if count > 0)
        if len(free) + len(cached) + in_use != self.num_blocks:
            raise RuntimeError(
                f"{len(free)} free + {len(cached)} cached + {in_use} in use = "
                f"{len(free) + len(cached) + in_use} blocks, but the cache has {self.num_blocks}"
            )
