"""Which blocks of the swap space are free: host memory for KV blocks, in slabs; bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinyvllm.util import ceil_div

SLAB_BYTES = 64 << 20  # what is pinned at once, at the most, while the device stands still


class SwapSpace:
    """Host blocks 0 .. num_blocks - 1, of which slab i holds `blocks_per_slab` from i times that.

    A block is free, or has users: the request whose tokens it holds, and each copy in flight to
    or from it. Runs of consecutive blocks are handed out where there are any, the lowest first,
    so that copies can be joined and slabs come into use one after the other.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        assert num_blocks > 0 and block_bytes > 0, (num_blocks, block_bytes)
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.blocks_per_slab = max(1, SLAB_BYTES // block_bytes)
        self._users = bytearray(num_blocks)  # of each block
        self._num_free = num_blocks

    @property
    def num_slabs(self) -> int:
        """Slabs that hold all blocks; the last one may be smaller."""
        return ceil_div(self.num_blocks, self.blocks_per_slab)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    @property
    def num_references(self) -> int:
        """Users of all blocks, counted together."""
        return sum(self._users)

    def in_use(self) -> np.ndarray:
        """Whether each block has users: bool [num_blocks]."""
        return np.frombuffer(self._users, np.uint8) > 0

    def slab_blocks(self, slab: int) -> int:
        """How many blocks a slab holds."""
        return min(self.blocks_per_slab, self.num_blocks - slab * self.blocks_per_slab)

    def allocate(self, n: int) -> list[int] | None:
        """Take n free blocks, with one user each; None, and nothing taken, when fewer are free."""
        if n > self._num_free:
            return None
        taken: list[int] = []
        run = n
        while len(taken) < n:
            run = min(run, n - len(taken))
            start = self._users.find(bytes(run))
            if start < 0:
                run = ceil_div(run, 2)
                continue
            self._users[start : start + run] = b"\1" * run
            taken += range(start, start + run)
        self._num_free -= n
        return taken

    def incref(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks, which are in use."""
        for block in blocks:
            assert self._users[block], f"host block {block} is free"
            self._users[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take a user from each of these blocks; without any a block is free."""
        for block in blocks:
            assert self._users[block], f"host block {block} is free already"
            self._users[block] -= 1
            self._num_free += not self._users[block]

    def shrink(self, num_blocks: int) -> None:
        """From now on there are only the first `num_blocks` blocks; the others must be free."""
        assert not any(self._users[num_blocks:]), "host blocks in use cannot be given up"
        self._num_free -= self.num_blocks - num_blocks
        self.num_blocks = num_blocks
        del self._users[num_blocks:]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the free blocks are those without users."""
        free = self._users.count(0)
        if free != self._num_free or len(self._users) != self.num_blocks:
            raise RuntimeError(
                f"{free} of {len(self._users)} host blocks have no users; on record are "
                f"{self._num_free} of {self.num_blocks}"
            )
