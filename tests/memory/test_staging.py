import numpy as np
import pytest

from tinyvllm.driver.memory import MemPool, copy_to_device, copy_to_host
from tinyvllm.memory.staging import StagingRing


def test_slots_are_distinct_and_taken_in_turn(fake_driver, fake_stream):
    with StagingRing(3, 16) as ring:
        slots = []
        for i in range(3):
            slots.append(ring.acquire())
            slots[i].array[:] = i
        assert [int(s.array.sum()) for s in slots] == [0, 16, 32]
        for slot in slots:
            ring.release(slot, fake_stream)
        assert ring.acquire() is slots[0]
    assert fake_driver.pinned == 0


def test_a_slot_is_given_out_once_its_event_has_passed(fake_driver, fake_stream):
    ring = StagingRing(1, 16)
    for ready in (True, False):
        fake_driver.events_ready = ready
        fake_driver.names.clear()
        slot = ring.acquire()
        assert ("cuEventSynchronize" in fake_driver.names) != ready
        ring.release(slot, fake_stream)
        assert fake_driver.names[-1] == "cuEventRecord"
    fake_driver.names.clear()
    ring.close()
    assert fake_driver.names == ["cuEventSynchronize", "cuEventDestroy", "cuMemFreeHost"]


def test_holding_every_slot_is_an_error(fake_driver):
    ring = StagingRing(2, 16)
    ring.acquire()
    ring.acquire()
    with pytest.raises(AssertionError, match="every slot is held"):
        ring.acquire()


@pytest.mark.gpu
def test_a_rewritten_slot_does_not_reach_earlier_copies(device, stream):
    size, count = 8 << 20, 24
    with (
        MemPool(device, 0, max_bytes=256 << 20) as pool,
        StagingRing(2, size) as ring,
    ):
        ptr = pool.alloc(size * count, stream)
        for i in range(count):
            slot = ring.acquire()
            slot.array[:] = i + 1
            copy_to_device(ptr + i * size, slot.array, stream)
            ring.release(slot, stream)
        values = np.empty((count, size), np.uint8)
        copy_to_host(values, ptr, stream)
        stream.synchronize()
        assert (values == np.arange(1, count + 1)[:, None]).all()
        pool.free(ptr, stream)
        stream.synchronize()
