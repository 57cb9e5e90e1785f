import threading

import pytest

from tinyvllm.driver import calls
from tinyvllm.driver.device import (
    Device,
    Event,
    Stream,
    cuda_unavailable,
    open_ahead,
    open_device,
)
from tinyvllm.driver.memory import MemPool, memset
from tinyvllm.util import InputError


@pytest.fixture
def driver(monkeypatch):
    """Sets what driver functions return, for a driver that is not there."""

    def set_results(**results):
        functions = {"cuGetErrorName": lambda s: (0, b"CUDA_ERROR_NO_DEVICE")}
        functions["cuGetErrorString"] = lambda s: (0, b"no device")
        for name, result in results.items():
            functions[name] = lambda *args, result=result: result
        monkeypatch.setattr(calls, "_functions", calls._Functions(functions))

    return set_results


def test_old_driver_is_named_with_what_is_needed(driver):
    driver(cuDriverGetVersion=(0, 12090))
    reason = cuda_unavailable()
    assert "CUDA 12.9" in reason and "580" in reason


def test_no_gpu(driver):
    driver(cuDriverGetVersion=(0, 13000), cuInit=(100,))
    assert cuda_unavailable() == "The NVIDIA driver sees no GPU."
    driver(cuDriverGetVersion=(0, 13000), cuInit=(0,), cuDeviceGetCount=(0, 0))
    assert cuda_unavailable() == "The NVIDIA driver sees no GPU."


def test_usable_driver(driver):
    driver(cuDriverGetVersion=(0, 13010), cuInit=(0,), cuDeviceGetCount=(0, 2))
    assert cuda_unavailable() is None


def test_no_driver_library(monkeypatch):
    def missing():
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(calls, "_functions", calls._Functions(cuDriverGetVersion=missing))
    assert "No NVIDIA driver" in cuda_unavailable()


def test_device_index_out_of_range(driver):
    driver(cuInit=(0,), cuDeviceGetCount=(0, 2))
    with pytest.raises(InputError, match=r"cuda:2: the driver sees 2 GPU"):
        Device(2)


def test_hopper_path_is_for_9_0_only(driver):
    for capability, requested, path in [
        ((9, 0), "auto", "hopper"),
        ((9, 0), "portable", "portable"),
        ((10, 0), "auto", "portable"),
        ((8, 0), "auto", "portable"),
    ]:
        attributes = iter((*capability, 132, 232448, 1 << 25))
        driver(
            cuInit=(0,),
            cuDeviceGetCount=(0, 1),
            cuDeviceGet=(0, 0),
            cuDeviceGetName=(0, b"GPU\0\0"),
            cuDeviceTotalMem=(0, 1 << 36),
            cuDevicePrimaryCtxRetain=(0, 1),
            cuCtxSetCurrent=(0,),
        )
        calls._functions["cuDeviceGetAttribute"] = lambda *a, it=attributes: (0, next(it))
        info = Device(0, requested).info
        assert (info.kernel_path, info.compute_capability) == (path, capability)
        assert (info.name, info.num_sms, info.smem_per_block) == ("GPU", 132, 232448)


def test_a_gpu_that_is_too_old_is_given_back(fake_driver, monkeypatch):
    monkeypatch.setattr(fake_driver, "cuDeviceGetAttribute", lambda *a: (0, 7), raising=False)
    with pytest.raises(InputError, match=r"compute capability 7\.7"):
        Device()
    assert fake_driver.names.count("cuDevicePrimaryCtxRelease") == 1


def test_a_device_opened_ahead_is_the_one_that_is_opened(fake_driver):
    open_ahead(0, "portable")
    ahead = open_device(0, "portable")
    assert ahead.info.kernel_path == "portable"
    assert fake_driver.names.count("cuDevicePrimaryCtxRetain") == 1
    with ahead, open_device(0, "portable") as another:
        assert another is not ahead
    assert fake_driver.names.count("cuDevicePrimaryCtxRelease") == 2


def test_errors_of_opening_ahead_are_raised_where_the_device_is_opened(fake_driver):
    open_ahead(3, "auto")
    with pytest.raises(InputError, match=r"cuda:3: the driver sees 1 GPU"):
        open_device(3, "auto")


def test_nothing_is_opened_ahead_for_the_cpu_or_without_cuda(driver):
    open_ahead(None, "auto")
    driver(cuDriverGetVersion=(0, 12090))
    open_ahead(0, "auto")
    driver(cuInit=(0,), cuDeviceGetCount=(0, 0))
    with pytest.raises(InputError, match="sees no GPU"):
        open_device(0, "auto")


@pytest.mark.gpu
def test_device_info_and_memory(device):
    info = device.info
    assert info.compute_capability >= (8, 0) and info.num_sms > 0
    assert 48 << 10 < info.smem_per_block <= 256 << 10
    free, total = device.mem_info()
    assert 0 < free <= total == info.total_memory


@pytest.mark.gpu
def test_context_is_made_current_in_other_threads(device):
    streams = []

    def work():
        device.make_current()
        with Stream() as stream:
            stream.synchronize()
            streams.append(stream)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(streams) == 1


@pytest.mark.gpu
def test_second_device_object_shares_the_context(device, stream):
    with Device(0):
        pass
    stream.synchronize()


@pytest.mark.gpu
def test_events_order_streams_and_measure(device, stream):
    size = 256 << 20
    with (
        MemPool(device, 0, max_bytes=2 * size) as pool,
        Stream() as other,
        Event(timing=True) as start,
        Event(timing=True) as end,
    ):
        ptr = pool.alloc(size, stream)
        start.record(stream)
        memset(ptr, 1, size, stream)
        end.record(stream)
        other.wait(end)
        other.synchronize()
        assert end.query()
        assert 0 < end.elapsed_ms(start) < 1000
        pool.free(ptr, stream)
        stream.synchronize()
