import ctypes
import threading

import numpy as np
import pytest

from tinyvllm.driver.device import Stream
from tinyvllm.driver.memory import MemPool, copy_to_host, memset
from tinyvllm.memory.upload import CopyJob, Uploader

ROW, PITCH, ROWS, JOBS = 96, 160, 10, 50


def job(data, dst, pitch):
    def fill(buffer):
        buffer[:] = data.reshape(-1)

    return CopyJob(fill, data.nbytes, dst, ROW, pitch)


def jobs_and_expected(base):
    """Jobs that write rows a pitch apart (even ones) or in one piece (odd ones)."""
    rng = np.random.default_rng(1)
    expected = np.full((JOBS, ROWS * PITCH), 0xEE, np.uint8)
    jobs = []
    for i in range(JOBS):
        data = rng.integers(0, 256, (ROWS, ROW), dtype=np.uint8)
        pitch = ROW if i % 2 else PITCH
        for r in range(ROWS):
            expected[i, r * pitch : r * pitch + ROW] = data[r]
        jobs.append(job(data, base + i * ROWS * PITCH, pitch))
    return jobs, expected


def test_everything_lands_where_it_should(fake_driver, fake_stream):
    target = np.full((JOBS, ROWS * PITCH), 0xEE, np.uint8)
    jobs, expected = jobs_and_expected(target.ctypes.data)
    with Uploader(fake_stream, slots=4, slot_bytes=4096, readers=3) as uploader:
        result = uploader.upload(iter(jobs))
    assert np.array_equal(target, expected)
    assert result.num_bytes == JOBS * ROWS * ROW and result.seconds > 0
    assert fake_driver.pinned == 0


def test_error_of_a_fill_is_raised_and_nothing_leaks(fake_driver, fake_stream):
    target = np.zeros((JOBS, ROWS * PITCH), np.uint8)
    jobs, _ = jobs_and_expected(target.ctypes.data)

    def fail(buffer):
        raise OSError("the file is truncated")

    jobs[20] = CopyJob(fail, ROWS * ROW, target.ctypes.data, ROW, ROW)
    uploader = Uploader(fake_stream, slots=4, slot_bytes=4096, readers=2)
    with pytest.raises(OSError, match="truncated"):
        uploader.upload(jobs)
    del jobs[20]
    assert uploader.upload(jobs).num_bytes == 49 * ROWS * ROW  # every slot came back
    uploader.close()
    assert fake_driver.pinned == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("reader")]


def test_error_of_the_job_source_is_raised(fake_driver, fake_stream):
    target = np.zeros(ROWS * PITCH, np.uint8)
    data = np.ones((ROWS, ROW), np.uint8)

    def source():
        for _ in range(3):
            yield job(data, target.ctypes.data, ROW)
        raise KeyError("tensor")

    with Uploader(fake_stream, slots=4, slot_bytes=4096) as uploader:
        with pytest.raises(KeyError):
            uploader.upload(source())
        assert uploader.upload([]).num_bytes == 0


def test_fills_of_several_slots_overlap(fake_driver, fake_stream):
    barrier = threading.Barrier(2, timeout=20)  # passes only if two threads are in it at once
    target = ctypes.create_string_buffer(64)
    both = CopyJob(lambda buffer: barrier.wait() and None, 64, ctypes.addressof(target), 64, 64)
    with Uploader(fake_stream, slots=4, slot_bytes=64, readers=2) as uploader:
        uploader.upload([both, both])


@pytest.mark.gpu
def test_upload_to_the_device(device):
    with (
        Stream() as stream,
        MemPool(device, 0, max_bytes=64 << 20) as pool,
        Uploader(stream, slots=4, slot_bytes=4096) as uploader,
    ):
        ptr = pool.alloc(JOBS * ROWS * PITCH, stream)
        memset(ptr, 0xEE, JOBS * ROWS * PITCH, stream)
        jobs, expected = jobs_and_expected(ptr)
        uploader.upload(jobs)
        values = np.empty_like(expected)
        copy_to_host(values, ptr, stream)
        stream.synchronize()
        assert np.array_equal(values, expected)
        pool.free(ptr, stream)
        stream.synchronize()
