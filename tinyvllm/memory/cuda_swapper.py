"""Swapping on a GPU: pinned slabs, a stream for the copies, and their times from events."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain

from tinyvllm.driver.calls import CudaError, phase
from tinyvllm.driver.device import Event, Stream
from tinyvllm.driver.memory import BatchCopy, PinnedBuffer, copy_to_device, copy_to_host
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.memory.swapper import Pairs, Slabs, merge_runs
from tinyvllm.util import format_bytes, logger

Events = tuple[Event, Event]  # before and after a batch, with timing


class CudaTicket:
    """A batch in the copy stream, which its second event ends."""

    def __init__(self, swapper: CudaSwapper, events: Events, num_bytes: int, out: bool) -> None:
        self.num_bytes, self.out = num_bytes, out
        self._swapper = swapper
        self._events: Events | None = events  # None: seen done

    def done(self) -> bool:
        if self._events is not None and self._events[1].query():
            self._finish()
        return self._events is None

    def wait(self) -> None:
        if self._events is not None:
            self._events[1].synchronize()
            self._finish()

    def _finish(self) -> None:
        events, self._events = self._events, None
        assert events is not None
        self._swapper.finished(self, events)


class CudaSwapper(Slabs):
    """Swaps blocks of the array that it is attached to, beside the work of `compute`.

    `compute` is the stream of the steps. The copies have a stream of their own, where each batch
    waits for the work that `compute` was given before it.
    """

    def __init__(self, space: SwapSpace, compute: Stream) -> None:
        super().__init__(space)
        self._address = self._num_bytes = 0
        self._compute = compute
        with ExitStack() as made:
            self._stream = made.enter_context(Stream())
            self._launched = Event()  # recorded again for each batch: a wait is for the last record
            made.pop_all()
        self._all_events: list[Events] = []
        self._free_events: list[Events] = []
        self._copy = BatchCopy()

    def attach(self, kv_cache: DeviceArray) -> None:
        """From now on blocks are those of `kv_cache`, [block, ...]."""
        assert kv_cache.nbytes % self.space.block_bytes == 0, (kv_cache, self.space.block_bytes)
        self._address, self._num_bytes = kv_cache.ptr, kv_cache.nbytes

    def detach(self) -> None:
        """Waits for the copies under way; from now on the array may be freed."""
        self._stream.synchronize()
        self._address = self._num_bytes = 0

    def new_slab(self, num_bytes: int) -> PinnedBuffer:
        """A pinned slab; with the first one the plain rates of copies are measured.

        Pinning stalls launches for as long as it lasts, whatever the thread: so the device
        finishes its work first, and the stall is as long as it looks.
        """
        start = time.perf_counter()
        with phase("swap"):
            self._compute.synchronize()
            slab = PinnedBuffer(num_bytes)
            stall = time.perf_counter() - start
            if self.stats.plain_out_rate is None:
                try:
                    self._measure(slab)
                except CudaError:
                    slab.close()
                    raise
        self.stats.stalls.append(stall)
        logger.info(
            "swap space: slab %d of %d pinned (%s) in %.1f ms",
            len(self.stats.stalls),
            self.space.num_slabs,
            format_bytes(num_bytes),
            self.stats.stalls[-1] * 1e3,
        )
        return slab

    def swap_out(self, pairs: Pairs) -> CudaTicket:
        """See `Swapper`."""
        return self._start(pairs, out=True)

    def swap_in(self, pairs: Pairs) -> CudaTicket:
        """See `Swapper`."""
        return self._start(pairs, out=False)

    def finished(self, ticket: CudaTicket, events: Events) -> None:
        """Counts a batch that is complete; its events are used again."""
        seconds = events[1].elapsed_ms(events[0]) / 1e3
        self.stats.count(ticket.num_bytes, seconds, out=ticket.out)
        self._free_events.append(events)

    def close(self) -> None:
        self._stream.synchronize()
        for event in chain.from_iterable(self._all_events):
            event.close()
        self._all_events.clear()
        self._free_events.clear()
        self._launched.close()
        self._stream.close()
        for slab in self.slabs:
            slab.close()
        self.slabs.clear()

    def _start(self, pairs: Pairs, out: bool) -> CudaTicket:
        size, per_slab = self.space.block_bytes, self.space.blocks_per_slab
        pieces = []
        for device, host, count in merge_runs(pairs, per_slab):
            on_device = self._address + device * size
            in_slab = self.slabs[host // per_slab].address + host % per_slab * size
            target, source = (in_slab, on_device) if out else (on_device, in_slab)
            pieces.append((target, source, count * size))
        if not self._free_events:
            self._free_events.append((Event(timing=True), Event(timing=True)))
            self._all_events += self._free_events
        events = self._free_events.pop()
        with phase("swap"):
            self._launched.record(self._compute)
            self._stream.wait(self._launched)
            events[0].record(self._stream)
            try:
                self._copy(pieces, self._stream)
            except CudaError:
                # Some of the copies may be under way, and the caller will use their blocks.
                self._free_events.append(events)
                self._stream.synchronize()
                raise
            events[1].record(self._stream)
        return CudaTicket(self, events, len(pairs) * size, out)

    def _measure(self, slab: PinnedBuffer) -> None:
        """Times one plain copy each way, after one to warm up.

        The first blocks go out and the same bytes come back, while nothing else runs: so this
        needs no memory of its own on the device.
        """
        host = slab.array[: self._num_bytes]
        copies: tuple[Callable[[], None], ...] = (
            lambda: copy_to_host(host, self._address, self._stream),
            lambda: copy_to_device(self._address, host, self._stream),
        )
        rates = []
        with Event(timing=True) as start, Event(timing=True) as end:
            for copy in copies:
                copy()
                start.record(self._stream)
                copy()
                end.record(self._stream)
                end.synchronize()
                rates.append(host.nbytes / end.elapsed_ms(start) * 1e3)
        self.stats.plain_out_rate, self.stats.plain_in_rate = rates
        logger.info("plain pinned copies: %.1f GB/s out, %.1f GB/s in", *(r / 1e9 for r in rates))
