"""A driver of plain host memory, so that the memory layer is tested without a GPU."""

import ctypes

import pytest

from tinyvllm.driver import calls
from tinyvllm.driver.device import Stream

OUT_OF_MEMORY = 2


class FakeDriver:
    """Work runs when it is submitted; `limit` bytes can be allocated; `names` are the calls."""

    def __init__(self):
        self.limit, self.used, self.next_handle = 1 << 40, 0, 1
        self.pinned = 0
        self.blocks = {}
        self.names = []
        self.trims_free = 0  # bytes that a trim makes available

    def function(self, name):
        body = getattr(self, name, None)

        def run(*args):
            self.names.append(name)
            result = body(*args) if body else 0
            return result if isinstance(result, tuple) else (result,)

        return run

    def handle(self, *args):
        self.next_handle += 1
        return 0, self.next_handle

    cuStreamCreate = cuEventCreate = cuMemPoolCreate = handle  # noqa: N815

    def allocate(self, size):
        memory = ctypes.create_string_buffer(size)
        address = ctypes.addressof(memory)
        self.blocks[address] = memory
        return 0, address

    def cuMemHostAlloc(self, size, flags):  # noqa: N802
        self.pinned += 1
        return self.allocate(size)

    def cuMemFreeHost(self, address):  # noqa: N802
        self.pinned -= 1
        del self.blocks[address]
        return 0

    def cuMemAllocFromPoolAsync(self, size, pool, stream):  # noqa: N802
        if self.used + size > self.limit:
            return OUT_OF_MEMORY, None
        self.used += size
        return self.allocate(size)

    def cuMemFreeAsync(self, address, stream):  # noqa: N802
        self.used -= len(self.blocks.pop(address))
        return 0

    def cuMemFree(self, address):  # noqa: N802
        self.used -= len(self.blocks.pop(address))
        return 0

    def cuMemPoolTrimTo(self, pool, keep):  # noqa: N802
        self.limit, self.trims_free = self.limit + self.trims_free, 0
        return 0

    def cuMemPoolGetAttribute(self, pool, attribute):  # noqa: N802
        return 0, self.used

    def cuStreamIsCapturing(self, stream):  # noqa: N802
        return 0, 0

    def cuMemcpyHtoDAsync(self, dst, src, size, stream):  # noqa: N802
        ctypes.memmove(dst, src, size)
        return 0

    def cuMemcpyDtoHAsync(self, dst, src, size, stream):  # noqa: N802
        ctypes.memmove(dst, src, size)
        return 0

    def cuMemcpy2DAsync(self, copy, stream):  # noqa: N802
        for row in range(copy.Height):
            src = copy.srcHost + row * copy.srcPitch
            ctypes.memmove(int(copy.dstDevice) + row * copy.dstPitch, src, copy.WidthInBytes)
        return 0

    def cuGetErrorName(self, status):  # noqa: N802
        return 0, b"CUDA_ERROR_OUT_OF_MEMORY"

    def cuGetErrorString(self, status):  # noqa: N802
        return 0, b"out of memory"


class FakeFunctions(dict):
    def __init__(self, driver):
        self.driver = driver

    def __missing__(self, name):
        return self.driver.function(name)


@pytest.fixture
def fake_driver(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(calls, "_functions", FakeFunctions(driver))
    return driver


@pytest.fixture
def fake_stream(fake_driver):
    return Stream()
