import statistics
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_driver import NOT_READY

from tinyvllm.driver.calls import CudaError, driver_api
from tinyvllm.driver.device import Event, Stream
from tinyvllm.driver.graph import capture
from tinyvllm.driver.memory import MemPool, copy_to_host, memset
from tinyvllm.driver.recorder import recording
from tinyvllm.memory.pool import DevicePool, OutOfMemoryError

MIB = 1 << 20


@pytest.fixture
def pool(fake_driver):
    device = SimpleNamespace(index=0, synchronize=lambda: fake_driver.names.append("synchronize"))
    with DevicePool(device, 100 * MIB, 0.5) as opened:
        yield opened


def test_budget_is_kept(pool, fake_stream):
    first = pool.alloc(60 * MIB, fake_stream)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.alloc(50 * MIB, fake_stream)
    for part in (
        "50.00 MiB requested",
        "60.00 MiB in use",
        "60.00 MiB reserved",
        "budget of 100.00 MiB",
        "gpu_memory_utilization",
    ):
        assert part in str(caught.value)
    pool.free(first, fake_stream)
    pool.alloc(100 * MIB, fake_stream)


def test_driver_out_of_memory_trims_and_tries_once_more(pool, fake_driver, fake_stream):
    fake_driver.limit, fake_driver.trims_free = 10 * MIB, 40 * MIB
    assert pool.alloc(50 * MIB, fake_stream)
    order = [n for n in fake_driver.names if n in ("synchronize", "cuMemPoolTrimTo")]
    assert order == ["synchronize", "cuMemPoolTrimTo"]


def test_out_of_memory_after_the_trim_is_one_error(pool, fake_driver, fake_stream):
    fake_driver.limit = 10 * MIB
    with pytest.raises(OutOfMemoryError, match=r"20\.00 MiB requested"):
        pool.alloc(20 * MIB, fake_stream)
    assert fake_driver.names.count("cuMemAllocFromPoolAsync") == 2
    assert pool.alloc(10 * MIB, fake_stream)  # the failure is not counted as in use


def test_an_allocation_and_its_free_are_one_call_each(pool, fake_driver, fake_stream):
    pool.free(pool.alloc(MIB, fake_stream), fake_stream)
    fake_driver.names.clear()
    pool.free(pool.alloc(MIB, fake_stream), fake_stream)
    assert fake_driver.names == ["cuMemAllocFromPoolAsync", "cuMemFreeAsync"]


def test_other_errors_are_passed_on_at_once(pool, fake_driver, fake_stream):
    fake_driver.cuMemAllocFromPoolAsync = lambda *args: (NOT_READY, None)
    with pytest.raises(CudaError, match="NOT_READY"):
        pool.alloc(MIB, fake_stream)
    assert "cuMemPoolTrimTo" not in fake_driver.names


def test_no_allocation_while_the_stream_is_captured(pool, fake_driver, fake_stream):
    with pytest.raises(RuntimeError, match="allocated before its capture"), capture(fake_stream):
        pool.alloc(MIB, fake_stream)
    assert fake_driver.used == 0
    assert pool.alloc(MIB, fake_stream), "the capture is over"
    with capture(fake_stream) as graph:
        pass
    graph.close()
    assert pool.alloc(MIB, fake_stream)


def test_close_frees_what_is_left(pool, fake_driver, fake_stream):
    pool.alloc(MIB, fake_stream)
    pool.free(pool.alloc(MIB, fake_stream), fake_stream)
    pool.close()
    assert fake_driver.used == 0 and fake_driver.names[-1] == "cuMemPoolDestroy"


@pytest.mark.gpu
def test_reserved_memory_stays_under_the_threshold(device, stream):
    with DevicePool(device, 256 * MIB, 0.5) as pool:
        pool.free(pool.alloc(100 * MIB, stream), stream)
        stream.synchronize()
        reserved = pool.stats().reserved
        assert 100 * MIB <= reserved <= pool.stats().threshold == 128 * MIB
        for size in (1, 10, 100):
            pool.free(pool.alloc(size * MIB, stream), stream)
        stream.synchronize()
        assert pool.stats().reserved == reserved and pool.stats().used == 0
        pool.trim()
        assert pool.stats().reserved == 0


@pytest.mark.gpu
def test_budget_on_the_device(device, stream):
    with DevicePool(device, 64 * MIB) as pool:
        ptr = pool.alloc(60 * MIB, stream)
        with pytest.raises(OutOfMemoryError):
            pool.alloc(8 * MIB, stream)
        pool.free(ptr, stream)
        pool.free(pool.alloc(64 * MIB, stream), stream)
        stream.synchronize()


@pytest.mark.gpu(alone=True)
def test_an_allocation_with_its_free_costs_little_beside_the_two_driver_calls(device, stream):
    """Hosts differ in speed: the bindings' own time, in turns with ours, is the measure."""
    api = driver_api()

    def pair(pool):
        pool.free(pool.alloc(MIB, stream), stream)

    def bare(pool):
        api.cuMemFreeAsync(
            api.cuMemAllocFromPoolAsync(MIB, pool.handle, stream.handle)[1], stream.handle
        )

    times = {pair: [], bare: []}
    with DevicePool(device, 256 * MIB) as pool, MemPool(device, 256 * MIB) as mem_pool:
        for _ in range(30):
            for once, owner in ((pair, pool), (bare, mem_pool)):
                stream.synchronize()
                start = time.perf_counter()
                for _ in range(500):
                    once(owner)
                times[once].append((time.perf_counter() - start) / 500 * 1e6)
    ours, theirs = statistics.median(times[pair]), statistics.median(times[bare])
    print(f"pool allocation + free: {ours:.2f} us, the bare bindings {theirs:.2f} us")
    assert ours <= 2 * theirs


SIZE = 64 * MIB  # of the buffers below
FLAGS = ("follow_event_dependencies", "allow_opportunistic", "allow_internal_dependencies")


def keep_busy(ptr, stream):
    """Some milliseconds of work, which takes the host less to submit."""
    for _ in range(500):
        memset(ptr, 1, SIZE, stream)


@pytest.mark.gpu(alone=True)
def test_memory_freed_on_one_stream_is_reused_on_the_other_without_a_wait_of_the_host(
    device, stream
):
    """The pool holds one buffer: the second stream gets the first one's, ordered by an event."""
    with Stream() as other, Event() as freed, DevicePool(device, SIZE) as pool:
        first = pool.alloc(SIZE, stream)
        keep_busy(first, stream)
        with recording() as recorder:
            pool.free(first, stream)
            freed.record(stream)
            other.wait(freed)
            second = pool.alloc(SIZE, other)
        assert not freed.query(), "the first stream still works: the host has not waited for it"
        assert second == first
        assert [call.name for call in recorder.calls] == [
            "cuMemFreeAsync",
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuMemAllocFromPoolAsync",
        ]
        memset(second, 7, SIZE, other)
        values = np.empty(SIZE, np.uint8)
        copy_to_host(values, second, other)
        other.synchronize()
        assert freed.query() and (values == 7).all(), "written after the work of the first stream"
        pool.free(second, other)


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize(
    ("flag", "event", "done", "max_bytes", "reused"),
    [
        ("follow_event_dependencies", True, False, 2 * SIZE, True),
        (None, True, False, 2 * SIZE, False),
        ("allow_opportunistic", False, True, 2 * SIZE, True),
        ("allow_opportunistic", False, False, 2 * SIZE, False),
        ("allow_internal_dependencies", False, False, SIZE, True),
        (None, False, False, SIZE, None),  # None: out of memory
    ],
)
def test_each_reuse_attribute_alone(device, stream, flag, event, done, max_bytes, reused):
    """Whether a stream gets what the other has freed: told by an event, seen done, or neither."""
    flags = {f"reuse_{name}": name == flag for name in FLAGS}
    with (
        Stream() as other,
        Event() as freed,
        MemPool(device, max_bytes, max_bytes=max_bytes, **flags) as pool,
    ):
        first = pool.alloc(SIZE, stream)
        keep_busy(first, stream)
        pool.free(first, stream)
        freed.record(stream)
        if event:
            other.wait(freed)
        while done and not freed.query():
            pass
        if reused is None:
            with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
                pool.alloc(SIZE, other)
        else:
            second = pool.alloc(SIZE, other)
            assert done or not freed.query(), "too little work to tell"
            assert (second == first) == reused
            pool.free(second, other)
        stream.synchronize()
        other.synchronize()
