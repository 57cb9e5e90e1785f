"""Outputs of the device on their way to the host: a ring of pinned slots, one for each run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from tinyvllm.driver.device import Event, Stream
from tinyvllm.driver.memory import PinnedBuffer, copy_to_host
from tinyvllm.memory.array import DeviceArray
from tinyvllm.util import Closing, align_up


class _Slot(Closing):
    """Pinned memory for the outputs of one run, and the event after the copies to it."""

    def __init__(self, num_bytes: int) -> None:
        with ExitStack() as made:
            self.buffer = made.enter_context(PinnedBuffer(num_bytes))
            self.event = Event()
            made.pop_all()

    def close(self) -> None:
        self.event.close()
        self.buffer.close()


class PendingOutputs:
    """Outputs of one run on their way to a slot; `get` waits for their event alone."""

    def __init__(self, ring: OutputRing, slot: _Slot, views: dict[str, np.ndarray]) -> None:
        self._ring, self._views = ring, views
        self._slot: _Slot | None = slot  # None: given back

    def discard(self) -> None:
        """Gives the slot back unread; later copies to it come after these in the stream."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._ring.recycle(slot)

    def get(self) -> dict[str, np.ndarray]:
        """The outputs by name, copied out of the slot, which is given back."""
        assert self._slot is not None, "the outputs were read or discarded before"
        start = time.perf_counter()
        self._slot.event.synchronize()
        self._ring.waited += time.perf_counter() - start
        outputs = {name: view.copy() for name, view in self._views.items()}
        self.discard()
        return outputs


class OutputRing(Closing):
    """`num_slots` slots of `slot_bytes`, each taken by a fetch until its outputs are read.

    All fetches must be given to one stream. `waited` is the seconds that the host has spent
    waiting for outputs.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.waited = 0.0
        self._free: deque[_Slot] = deque()
        with ExitStack() as made:  # after an error none is left
            made.callback(self.close)
            for _ in range(num_slots):
                self._free.append(_Slot(slot_bytes))
            made.pop_all()

    def fetch(self, arrays: Mapping[str, DeviceArray], stream: Stream) -> PendingOutputs:
        """Queues the copies of these (contiguous) arrays to a slot.

        Arrays that are larger than a slot together get one of their own.
        """
        total = sum(align_up(a.nbytes, 16) for a in arrays.values())
        if total > self.slot_bytes:
            slot = _Slot(total)
        else:
            assert self._free, "every slot holds outputs: read them with get()"
            slot = self._free.popleft()
        views, offset = {}, 0
        for name, array in arrays.items():
            target = slot.buffer.array[offset : offset + array.nbytes]
            if array.nbytes:
                copy_to_host(target, array.ptr, stream)
            views[name] = target.view(array.dtype.storage).reshape(array.shape)
            offset += align_up(array.nbytes, 16)
        slot.event.record(stream)
        return PendingOutputs(self, slot, views)

    def recycle(self, slot: _Slot) -> None:
        """Takes a slot back once its outputs have been read or given up."""
        if slot.buffer.num_bytes == self.slot_bytes:
            self._free.append(slot)
        else:
            slot.close()

    def close(self) -> None:
        """Frees the slots that hold no outputs; the stream must have passed all copies."""
        while self._free:
            self._free.pop().close()
