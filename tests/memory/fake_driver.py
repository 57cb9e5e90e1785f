"""A driver of plain host memory, so that what manages memory is tested without a GPU."""

import ctypes
from types import SimpleNamespace

OUT_OF_MEMORY, NOT_READY, NOT_SUPPORTED = 2, 600, 801
NAMES = {
    NOT_READY: b"CUDA_ERROR_NOT_READY",
    NOT_SUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED",
    719: b"CUDA_ERROR_LAUNCH_FAILED",
}
DEVICE_ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
}


class FakeDriver:
    """A GPU whose copies run when they are submitted and whose kernels do nothing.

    `limit` bytes can be allocated, of which `used` are and `reserved` have been since the last
    trim; `pinned` pieces of host memory are held; `names` are the calls in their order. With
    `fail_at` set, so many allocations on either side succeed, and none after them; with `refused`,
    so many calls of the function of that name.
    """

    def __init__(self):
        self.limit, self.used, self.reserved, self.next_handle = 1 << 40, 0, 0, 1
        self.pinned = 0
        self.blocks = {}
        self.names = []
        self.trims_free = 0  # bytes that a trim makes available
        self.pool_attributes = {}
        self.events_ready = True
        self.fail_at = None
        self.refused = None  # (name, count)
        self.batches = []  # of copies: the size of each in units of the smallest
        self.batches_supported, self.batch_status = True, 0

    def function(self, name):
        body = getattr(self, name, None)

        def run(*args):
            self.names.append(name)
            refused, count = self.refused or (None, 0)
            if name == refused and self.names.count(name) > count:
                return OUT_OF_MEMORY, None
            result = body(*args) if body else 0
            return result if isinstance(result, tuple) else (result,)

        return run

    def handle(self, *args):
        self.next_handle += 1
        return 0, self.next_handle

    cuStreamCreate = cuEventCreate = cuMemPoolCreate = handle  # noqa: N815
    cuDevicePrimaryCtxRetain = cuStreamEndCapture = cuGraphInstantiate = handle  # noqa: N815

    def cuDriverGetVersion(self):  # noqa: N802
        return 0, 13000

    def nvrtcVersion(self):  # noqa: N802
        return 0, 13, 0

    def cuDeviceGetCount(self):  # noqa: N802
        return 0, 1

    def cuDeviceGet(self, index):  # noqa: N802
        return 0, index

    def cuDeviceGetName(self, length, device):  # noqa: N802
        return 0, b"Fake\0"

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return 0, DEVICE_ATTRIBUTES.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)

    def cuDeviceTotalMem(self, device):  # noqa: N802
        return 0, self.limit

    def cuMemGetInfo(self):  # noqa: N802
        return 0, self.limit - self.reserved, self.limit

    def cuEventQuery(self, event):  # noqa: N802
        return 0 if self.events_ready else NOT_READY

    def fails(self):
        """Whether this allocation is the one that shall fail."""
        if self.fail_at is None:
            return False
        self.fail_at -= 1
        return self.fail_at < 0

    def allocate(self, size):
        memory = ctypes.create_string_buffer(size)
        address = ctypes.addressof(memory)
        self.blocks[address] = memory
        return 0, address

    def cuMemHostAlloc(self, size, flags):  # noqa: N802
        if self.fails():
            return OUT_OF_MEMORY, None
        self.pinned += 1
        return self.allocate(size)

    def cuMemFreeHost(self, address):  # noqa: N802
        self.pinned -= 1
        del self.blocks[address]
        return 0

    def cuMemAllocFromPoolAsync(self, size, pool, stream):  # noqa: N802
        if self.fails() or self.used + size > self.limit:
            return OUT_OF_MEMORY, None
        self.used += size
        self.reserved = max(self.reserved, self.used)
        return self.allocate(size)

    def cuMemFreeAsync(self, address, stream):  # noqa: N802
        self.used -= len(self.blocks.pop(address))
        return 0

    def cuMemFree(self, address):  # noqa: N802
        self.used -= len(self.blocks.pop(address))
        return 0

    def cuMemPoolTrimTo(self, pool, keep):  # noqa: N802
        self.limit, self.trims_free = self.limit + self.trims_free, 0
        self.reserved = max(self.used, keep)
        return 0

    def cuMemPoolSetAttribute(self, pool, attribute, value):  # noqa: N802
        self.pool_attributes[attribute.name.removeprefix("CU_MEMPOOL_ATTR_")] = int(value)
        return 0

    def cuMemPoolGetAttribute(self, pool, attribute):  # noqa: N802
        return 0, self.reserved if "RESERVED" in attribute.name else self.used

    def cuMemcpyHtoDAsync(self, dst, src, size, stream):  # noqa: N802
        ctypes.memmove(dst, src, size)
        return 0

    def cuMemcpyDtoHAsync(self, dst, src, size, stream):  # noqa: N802
        ctypes.memmove(dst, src, size)
        return 0

    def cuMemcpyAsync(self, dst, src, size, stream):  # noqa: N802
        ctypes.memmove(dst, src, size)
        return 0

    def cuMemcpyBatchAsync(  # noqa: N802
        self, targets, sources, sizes, count, attributes, first, num_attributes, stream
    ):
        if not self.batches_supported or self.batch_status:
            return self.batch_status or NOT_SUPPORTED
        assert len(targets) == len(sources) == len(sizes) == count
        assert (first, num_attributes) == ([0], 1)
        self.batches.append([size // min(sizes) for size in sizes])
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(int(target), int(source), size)
        return 0

    def cuEventElapsedTime(self, start, end):  # noqa: N802
        return 0, 1.0

    def cuMemcpy2DAsync(self, copy, stream):  # noqa: N802
        for row in range(copy.Height):
            src = copy.srcHost + row * copy.srcPitch
            ctypes.memmove(int(copy.dstDevice) + row * copy.dstPitch, src, copy.WidthInBytes)
        return 0

    def cuTensorMapEncodeTiled(self, *what):  # noqa: N802
        return 0, SimpleNamespace(opaque=[0] * 16)

    def cuGetErrorName(self, status):  # noqa: N802
        return 0, NAMES.get(status, b"CUDA_ERROR_OUT_OF_MEMORY")

    def cuGetErrorString(self, status):  # noqa: N802
        return 0, b"as asked for by the test"


class FakeFunctions(dict):
    """In place of `calls._functions`."""

    def __init__(self, driver):
        self.driver = driver

    def __missing__(self, name):
        return self.driver.function(name)
