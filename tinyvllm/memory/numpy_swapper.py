"""Swapping without a GPU: the rules and the bookkeeping of the real one, as late as permitted."""

from __future__ import annotations

import time
from collections import deque
from math import prod

import numpy as np

from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.memory.swapper import Pairs, Slabs, merge_runs

POLLS = 2  # how often a ticket is asked in vain
MEASURED_BYTES = 1 << 20


class NumpyTicket:
    """A batch whose copies are made when it is first seen done, and not before."""

    def __init__(self, swapper: NumpySwapper, pairs: Pairs, out: bool) -> None:
        self.pairs, self.out = pairs, out
        self.complete = False
        self._swapper, self._polls = swapper, swapper.polls

    def done(self) -> bool:
        if not self.complete and self._polls == 0:
            self.wait()
        self._polls = max(0, self._polls - 1)
        return self.complete

    def wait(self) -> None:
        while not self.complete:
            self._swapper.copy_next()


class NumpySwapper(Slabs):
    """Swaps blocks of the array that it is attached to, which steps read and write meanwhile.

    Nothing is copied before a ticket was asked `polls` times, and what is to be copied in reads
    as NaN until then: a block that is used or reused too early gives wrong tokens.
    """

    def __init__(self, space: SwapSpace, polls: int = POLLS) -> None:
        super().__init__(space)
        self.polls = polls
        self._kv_cache = np.empty((0, 0))
        self.under_way: deque[NumpyTicket] = deque()  # the oldest first

    def attach(self, kv_cache: np.ndarray) -> None:
        """From now on blocks are those of `kv_cache`, [block, ...]."""
        self._kv_cache = kv_cache

    def detach(self) -> None:
        """Gives the array up; no copy may be under way."""
        assert not self.under_way, f"{len(self.under_way)} batches are under way"
        self._kv_cache = np.empty((0, 0))

    def new_slab(self, num_bytes: int) -> np.ndarray:
        """A slab as blocks of the cache's shape."""
        shape = self._kv_cache.shape[1:]
        blocks = num_bytes // (prod(shape) * self._kv_cache.itemsize)
        slab = np.empty((blocks, *shape), self._kv_cache.dtype)
        self.stats.stalls.append(0.0)
        if self.stats.plain_out_rate is None:
            self.stats.plain_out_rate = self.stats.plain_in_rate = _copy_rate()
        return slab

    def swap_out(self, pairs: Pairs) -> NumpyTicket:
        """See `Swapper`."""
        return self._start(pairs, out=True)

    def swap_in(self, pairs: Pairs) -> NumpyTicket:
        """See `Swapper`."""
        for device, _ in pairs:
            self._kv_cache[device] = np.nan
        return self._start(pairs, out=False)

    def copy_next(self) -> None:
        """Carries out the oldest batch."""
        ticket = self.under_way.popleft()
        start = time.perf_counter()
        per_slab = self.space.blocks_per_slab
        for device, host, count in merge_runs(ticket.pairs, per_slab):
            on_device = self._kv_cache[device : device + count]
            in_slab = self.slabs[host // per_slab][host % per_slab :][:count]
            if ticket.out:
                in_slab[...] = on_device
            else:
                on_device[...] = in_slab
        num_bytes = len(ticket.pairs) * self.space.block_bytes
        self.stats.count(num_bytes, time.perf_counter() - start, out=ticket.out)
        ticket.complete = True

    def close(self) -> None:
        self.under_way.clear()
        self.slabs.clear()
        self.detach()

    def _start(self, pairs: Pairs, out: bool) -> NumpyTicket:
        ticket = NumpyTicket(self, pairs, out)
        self.under_way.append(ticket)
        return ticket


def _copy_rate() -> float:
    """Bytes a second of a plain copy."""
    source, target = np.ones(MEASURED_BYTES, np.uint8), np.zeros(MEASURED_BYTES, np.uint8)
    start = time.perf_counter()
    target[...] = source
    return MEASURED_BYTES / (time.perf_counter() - start)
