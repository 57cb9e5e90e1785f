"""A ring of pinned slots between host and device, each guarded by an event."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from tinyvllm.driver.device import Event, Stream
from tinyvllm.driver.memory import PinnedBuffer
from tinyvllm.util import Closing, align_up


class Slot:
    """A piece of pinned memory, `array` (uint8, [slot_bytes]), and the event of its last use."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.event = Event()
        self.held = False


class StagingRing(Closing):
    """`num_slots` slots of `slot_bytes`, taken in turn; a slot is rewritten only when the device
    has passed its last use."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        pitch = align_up(slot_bytes, 256)  # so that a slot can be viewed as any type
        self._buffer = PinnedBuffer(num_slots * pitch)
        pieces = self._buffer.array.reshape(num_slots, pitch)[:, :slot_bytes]
        self._slots: list[Slot] = []
        self._next = 0
        with ExitStack() as made:  # after an error none is left
            made.callback(self.close)
            for piece in pieces:
                self._slots.append(Slot(piece))
            made.pop_all()

    def acquire(self) -> Slot:
        """The next slot, after a wait for the device if that still uses it."""
        slot = self._slots[self._next]
        assert not slot.held, "every slot is held: release one first"
        self._next = (self._next + 1) % len(self._slots)
        if not slot.event.query():
            slot.event.synchronize()
        slot.held = True
        return slot

    def release(self, slot: Slot, stream: Stream) -> None:
        """Hands a slot back; it is free when `stream` has done the work given to it so far."""
        slot.event.record(stream)
        slot.held = False

    def close(self) -> None:
        """Frees the slots after waiting for the device to pass their last uses."""
        for slot in self._slots:
            slot.event.synchronize()
            slot.event.close()
            slot.array = slot.array[:0]
        self._slots.clear()
        self._buffer.close()
