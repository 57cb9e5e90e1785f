from types import SimpleNamespace

import pytest

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
    for part in ("50.00 MiB requested", "60.00 MiB in use", "100.00 MiB", "gpu_memory_utilization"):
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
