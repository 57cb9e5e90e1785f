"""The CUDA swapper on the fake driver, where copies are made at once; and on a GPU."""

import ctypes
import random
import time

import numpy as np
import pytest

from tinyvllm.driver.calls import CudaError
from tinyvllm.driver.device import Stream
from tinyvllm.driver.memory import copy_to_device, copy_to_host, memset
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.cuda_swapper import CudaSwapper
from tinyvllm.memory.pool import DevicePool
from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.util import DType

BLOCK_BYTES = 24


class Cache:
    """Blocks in the memory of the fake driver."""

    def __init__(self, num_blocks):
        self.memory = ctypes.create_string_buffer(num_blocks * BLOCK_BYTES)
        self.blocks = np.frombuffer(self.memory, np.uint8).reshape(num_blocks, BLOCK_BYTES)
        self.blocks[...] = np.random.default_rng(0).integers(0, 256, self.blocks.shape)
        address = ctypes.addressof(self.memory)
        self.array = DeviceArray(address, (num_blocks, BLOCK_BYTES // 4), DType.F32)


@pytest.fixture
def cache():
    return Cache(12)


@pytest.fixture
def swapper(fake_driver, fake_stream, cache):
    space = SwapSpace(8, BLOCK_BYTES)
    space.blocks_per_slab = 3
    opened = CudaSwapper(space, fake_stream)
    opened.attach(cache.array)
    yield opened
    opened.detach()
    opened.close()
    assert (fake_driver.pinned, fake_driver.blocks) == (0, {})


def pairs(device, host):
    return list(zip(device, host, strict=True))


def test_blocks_come_back_bit_for_bit_in_other_places(swapper, cache, fake_driver):
    before = cache.blocks.copy()
    host = swapper.allocate(7)
    out, back = [3, 4, 5, 9, 0, 2, 1], [11, 10, 0, 1, 2, 7, 6]
    fake_driver.names.clear()
    swapper.swap_out(pairs(out, host)).wait()
    assert fake_driver.names == [
        "cuEventCreate",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventRecord",
        "cuMemcpyBatchAsync",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuEventElapsedTime",
    ]
    assert fake_driver.batches[-1] == [3, 1, 1, 1, 1], "runs are one piece, in one slab"
    cache.blocks[...] = 0
    ticket = swapper.swap_in(pairs(back, host))
    fake_driver.events_ready = False
    assert not ticket.done()
    fake_driver.events_ready = True
    assert ticket.done() and ticket.done()
    np.testing.assert_array_equal(cache.blocks[back], before[out])
    assert not np.delete(cache.blocks, back, axis=0).any()
    stats = swapper.stats
    assert stats.bytes_out == stats.bytes_in == 7 * BLOCK_BYTES
    assert stats.seconds_out == stats.seconds_in == 0.001, "the fake driver's time"


def test_pinning_waits_for_the_device_and_the_first_slab_is_measured(swapper, cache, fake_driver):
    before = cache.blocks.copy()
    fake_driver.names.clear()
    swapper.allocate(1)
    assert fake_driver.names[:2] == ["cuStreamSynchronize", "cuMemHostAlloc"]
    assert fake_driver.names.count("cuMemcpyDtoHAsync") == 2
    assert fake_driver.names.count("cuMemcpyHtoDAsync") == 2
    np.testing.assert_array_equal(cache.blocks, before)
    slab_bytes = 3 * BLOCK_BYTES
    assert swapper.stats.plain_out_rate == swapper.stats.plain_in_rate == slab_bytes / 0.001
    fake_driver.names.clear()
    swapper.allocate(5)
    assert fake_driver.names == ["cuStreamSynchronize", "cuMemHostAlloc"]
    assert len(swapper.stats.stalls) == 2


def test_without_more_host_memory_the_space_stays_as_it_is(swapper, fake_driver, caplog):
    swapper.allocate(2)
    fake_driver.fail_at = 0
    assert swapper.allocate(3) is None
    assert "no more host memory can be pinned: the swap space stays at 72 B" in caplog.text
    assert (swapper.space.num_blocks, swapper.space.num_free) == (3, 1)
    fake_driver.fail_at = None
    assert swapper.allocate(1) == [2]
    swapper.space.check_integrity()


def test_a_first_slab_that_cannot_be_measured_is_given_back(swapper, fake_driver, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fake_driver, "cuMemcpyHtoDAsync", lambda *args: 719)
        with pytest.raises(CudaError, match="cuMemcpyHtoDAsync"):
            swapper.allocate(2)
    assert (fake_driver.pinned, swapper.slabs, swapper.stats.stalls) == (0, [], [])
    assert swapper.space.num_used == 0
    assert swapper.allocate(8) == list(range(8))


def test_closing_with_copies_under_way_closes_their_events(fake_driver, fake_stream, cache):
    swapper = CudaSwapper(SwapSpace(8, BLOCK_BYTES), fake_stream)
    swapper.attach(cache.array)
    host = swapper.allocate(2)
    fake_driver.names.clear()
    tickets = [swapper.swap_out(pairs([1, 2], host)) for _ in range(3)]
    tickets[0].wait()
    swapper.close()
    assert fake_driver.names.count("cuEventDestroy") == 2 * 3 + 1


def test_a_driver_without_batches_copies_one_by_one(swapper, cache, fake_driver, caplog):
    caplog.set_level("INFO", "tinyvllm")
    before = cache.blocks.copy()
    host = swapper.allocate(4)
    fake_driver.batches_supported = False
    swapper.swap_out(pairs([1, 2, 3, 5], host)).wait()
    swapper.swap_in(pairs([6, 7, 8, 9], host)).wait()
    np.testing.assert_array_equal(cache.blocks[[6, 7, 8, 9]], before[[1, 2, 3, 5]])
    assert fake_driver.names.count("cuMemcpyBatchAsync") == 1, "asked once"
    assert fake_driver.names.count("cuMemcpyAsync") == 2 + 2
    assert caplog.text.count("one by one") == 1


def test_a_batch_that_fails_leaves_nothing_under_way(swapper, fake_driver):
    host = swapper.allocate(2)
    fake_driver.batch_status = 1
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync"):
        swapper.swap_out(pairs([1, 2], host))
    assert fake_driver.names[-1] == "cuStreamSynchronize"


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_random_permutations_on_the_gpu(device, block_size):
    """Blocks of the reference model's size go out and come back to other places, beside work."""
    block_bytes, num_blocks = 16 * 2 * 8 * block_size * 64 * 2, 160
    rng = random.Random(block_size)
    want = np.random.default_rng(1).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    with Stream() as stream, DevicePool(device, 1 << 30) as pool:
        address = pool.alloc(want.nbytes, stream)
        scratch = pool.alloc(64 << 20, stream)
        copy_to_device(address, want, stream)
        space = SwapSpace(num_blocks, block_bytes)
        with CudaSwapper(space, stream) as swapper:
            swapper.attach(DeviceArray(address, (num_blocks, block_bytes // 2), DType.BF16))
            for _ in range(4):
                count = rng.randint(40, num_blocks)
                host = swapper.allocate(count)
                rng.shuffle(host)
                out = rng.sample(range(num_blocks), count)
                back = rng.sample(range(num_blocks), count)
                for _ in range(20):  # what the copies run beside
                    memset(scratch, 1, 64 << 20, stream)
                left = swapper.swap_out(pairs(out, host))
                left.wait()
                memset(address, 255, want.nbytes, stream)  # the copies in must wait for this
                ticket = swapper.swap_in(pairs(back, host))
                while not ticket.done():
                    time.sleep(1e-4)
                have = np.empty_like(want)
                copy_to_host(have, address, stream)
                stream.synchronize()
                np.testing.assert_array_equal(have[back], want[out])
                assert (np.delete(have, back, axis=0) == 255).all()
                want = have
                space.free(host)
            stats = swapper.stats
            assert stats.bytes_out == stats.bytes_in > 0
            assert len(stats.stalls) == len(swapper.slabs)
            for num_bytes, seconds, plain in (
                (stats.bytes_out, stats.seconds_out, stats.plain_out_rate),
                (stats.bytes_in, stats.seconds_in, stats.plain_in_rate),
            ):
                assert num_bytes / seconds > plain / 3, "far from the speed of the bus"
            swapper.detach()
        pool.free(scratch, stream)
        pool.free(address, stream)
        stream.synchronize()
