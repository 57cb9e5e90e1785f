import numpy as np
import pytest

from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.output_ring import OutputRing
from tinyvllm.util import DType


def on_device(values):
    """The fake device is host memory, so an array's own address serves."""
    dtype = DType.I32 if values.dtype == np.int32 else DType.F32
    return DeviceArray(values.ctypes.data, values.shape, dtype)


def test_outputs_come_back_by_name_with_shape_and_type(fake_stream):
    tokens, logprobs = np.arange(3, dtype=np.int32), np.ones((3, 2), np.float32) / 3
    empty = np.empty((0, 2), np.int32)
    arrays = {"tokens": tokens, "empty": empty, "logprobs": logprobs}
    with OutputRing(2, 256) as ring:
        pending = ring.fetch({n: on_device(a) for n, a in arrays.items()}, fake_stream)
        found = pending.get()
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            assert np.array_equal(found[name], array)
        assert ring.waited > 0


def test_read_outputs_are_copies_and_their_slot_is_used_again(fake_stream):
    with OutputRing(1, 64) as ring:
        first = ring.fetch({"a": on_device(np.array([1, 2], np.int32))}, fake_stream).get()
        second = ring.fetch({"a": on_device(np.array([3, 4], np.int32))}, fake_stream).get()
        assert (first["a"].tolist(), second["a"].tolist()) == ([1, 2], [3, 4])


def test_outputs_are_read_once_the_event_behind_their_copies_has_passed(fake_driver, fake_stream):
    arrays = {name: on_device(np.zeros(1, np.int32)) for name in "ab"}
    with OutputRing(1, 64) as ring:
        fake_driver.names.clear()
        pending = ring.fetch(arrays, fake_stream)
        assert fake_driver.names == ["cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync", "cuEventRecord"]
        pending.get()
        assert fake_driver.names[3:] == ["cuEventSynchronize"]
    assert fake_driver.names[4:] == ["cuEventDestroy", "cuMemFreeHost"]


def test_a_slot_is_given_back_once(fake_stream):
    values = on_device(np.zeros(1, np.int32))
    with OutputRing(1, 64) as ring:
        pending = ring.fetch({"a": values}, fake_stream)
        with pytest.raises(AssertionError, match="every slot holds outputs"):
            ring.fetch({"a": values}, fake_stream)
        pending.discard()
        pending.discard()
        with pytest.raises(AssertionError, match="read or discarded before"):
            pending.get()
        ring.fetch({"a": values}, fake_stream)
        with pytest.raises(AssertionError, match="every slot holds outputs"):
            ring.fetch({"a": values}, fake_stream)


def test_what_is_larger_than_a_slot_gets_memory_of_its_own(fake_driver, fake_stream):
    values = np.arange(100, dtype=np.int32)
    with OutputRing(1, 64) as ring:
        pending = ring.fetch({"a": on_device(values)}, fake_stream)
        assert fake_driver.pinned == 2
        assert np.array_equal(pending.get()["a"], values)
        assert fake_driver.pinned == 1
    assert fake_driver.pinned == 0
