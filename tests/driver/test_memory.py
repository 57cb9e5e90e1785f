import numpy as np
import pytest

from tinyvllm.driver.graph import capture
from tinyvllm.driver.memory import (
    MemPool,
    PinnedBuffer,
    copy_2d_to_device,
    copy_device,
    copy_to_device,
    copy_to_host,
    memset,
)

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def pool(device, stream):
    with MemPool(device, 64 * MIB, max_bytes=128 * MIB) as opened:
        yield opened
        stream.synchronize()


def test_usage_threshold_and_trim(pool, stream):
    assert pool.release_threshold == 64 * MIB
    ptr = pool.alloc(3 * MIB, stream)
    usage = pool.usage()
    assert usage.used == usage.used_high and 3 * MIB <= usage.used <= usage.reserved
    pool.free(ptr, stream)
    stream.synchronize()
    assert pool.usage().used == 0 and pool.usage().reserved > 0  # kept: under the threshold
    pool.trim_to(0)
    assert pool.usage().reserved == 0 and pool.usage().used_high == usage.used


def test_copies_there_along_and_back(pool, stream):
    data = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8)
    a, b = pool.alloc(data.nbytes, stream), pool.alloc(data.nbytes, stream)
    copy_to_device(a, data, stream)
    memset(b, 0xA5, data.nbytes, stream)
    copy_device(b + 1, a + 1, data.nbytes - 2, stream)
    back = np.zeros_like(data)
    copy_to_host(back, b, stream)
    stream.synchronize()
    assert back[0] == back[-1] == 0xA5
    assert np.array_equal(back[1:-1], data[1:-1])


def test_rows_land_a_pitch_apart(pool, stream):
    rows, width, src_pitch, dst_pitch = 37, 100, 128, 256
    data = np.arange(rows * src_pitch, dtype=np.uint32).astype(np.uint8).reshape(rows, src_pitch)
    ptr = pool.alloc(rows * dst_pitch, stream)
    memset(ptr, 7, rows * dst_pitch, stream)
    copy_2d_to_device(ptr, dst_pitch, data, src_pitch, width, rows, stream)
    back = np.empty((rows, dst_pitch), np.uint8)
    copy_to_host(back, ptr, stream)
    stream.synchronize()
    assert np.array_equal(back[:, :width], data[:, :width])
    assert (back[:, width:] == 7).all()


def test_pinned_memory(pool, stream):
    with PinnedBuffer(1000) as buffer:
        buffer.array[:] = np.arange(1000) % 251
        ptr = pool.alloc(1000, stream)
        copy_to_device(ptr, buffer.array, stream)
        stream.synchronize()
        buffer.array[:] = 0
        copy_to_host(buffer.array, ptr, stream)
        stream.synchronize()
        assert np.array_equal(buffer.array, np.arange(1000) % 251)
    assert buffer.array.size == 0
    buffer.close()  # a second time is harmless


def test_no_allocation_during_capture(pool, stream):
    with pytest.raises(RuntimeError, match="captured"), capture(stream):
        pool.alloc(MIB, stream)
    assert pool.alloc(MIB, stream)  # the stream is usable again
