"""Raw memory: the explicit pool, pinned host memory, copies and fills; addresses are ints."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyvllm.driver.calls import CudaError, call, driver_api, succeeds
from tinyvllm.driver.device import Device, Stream
from tinyvllm.util import Closing, logger


@dataclass(frozen=True)
class PoolUsage:
    """Bytes that a pool holds from the driver and bytes that are allocated, now and at most."""

    reserved: int
    reserved_high: int
    used: int
    used_high: int


class MemPool(Closing):
    """An explicit stream-ordered pool of device memory.

    Memory that is freed stays with the pool up to `release_threshold` bytes. The reuse flags
    say which frees on another stream an allocation may follow: those ordered by an event, those
    that happen to be complete, and those made safe by a dependency that the driver inserts.
    `max_bytes` caps the pool (0: the device's memory).
    """

    def __init__(
        self,
        device: Device,
        release_threshold: int,
        *,
        reuse_follow_event_dependencies: bool = True,
        reuse_allow_opportunistic: bool = True,
        reuse_allow_internal_dependencies: bool = True,
        max_bytes: int = 0,
    ) -> None:
        cu = driver_api()
        props = cu.CUmemPoolProps()
        props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = device.index
        props.maxSize = max_bytes
        self.handle: Any = call("cuMemPoolCreate", props)
        try:
            self._set("RELEASE_THRESHOLD", cu.cuuint64_t(release_threshold))
            self._set("REUSE_FOLLOW_EVENT_DEPENDENCIES", int(reuse_follow_event_dependencies))
            self._set("REUSE_ALLOW_OPPORTUNISTIC", int(reuse_allow_opportunistic))
            self._set("REUSE_ALLOW_INTERNAL_DEPENDENCIES", int(reuse_allow_internal_dependencies))
        except CudaError:
            self.close()
            raise

    def _set(self, attribute: str, value: Any) -> None:
        key = getattr(driver_api().CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{attribute}")
        call("cuMemPoolSetAttribute", self.handle, key, value)

    def _get(self, attribute: str) -> int:
        key = getattr(driver_api().CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{attribute}")
        return int(call("cuMemPoolGetAttribute", self.handle, key))

    def usage(self) -> PoolUsage:
        return PoolUsage(
            reserved=self._get("RESERVED_MEM_CURRENT"),
            reserved_high=self._get("RESERVED_MEM_HIGH"),
            used=self._get("USED_MEM_CURRENT"),
            used_high=self._get("USED_MEM_HIGH"),
        )

    @property
    def release_threshold(self) -> int:
        """Bytes that the pool keeps when memory is freed."""
        return self._get("RELEASE_THRESHOLD")

    def trim_to(self, num_bytes: int) -> None:
        """Gives unused memory back to the driver, keeping at least `num_bytes` reserved."""
        call("cuMemPoolTrimTo", self.handle, num_bytes)

    def alloc(self, num_bytes: int, stream: Stream) -> int:
        """Address of `num_bytes`, usable by work that `stream` is given from now on.

        Raises RuntimeError while `stream` is captured, CudaError when memory runs out.
        """
        if stream.capturing:
            raise RuntimeError(
                f"allocation of {num_bytes} bytes while the stream is being captured: a graph "
                "must use memory that was allocated before its capture began"
            )
        return int(call("cuMemAllocFromPoolAsync", num_bytes, self.handle, stream.handle))

    def free(self, address: int, stream: Stream) -> None:
        """Frees an allocation after the work that `stream` was given so far."""
        call("cuMemFreeAsync", address, stream.handle)

    def free_now(self, address: int) -> None:
        """Frees an allocation that no work uses any more, outside of any stream."""
        call("cuMemFree", address)

    def close(self) -> None:
        """Gives the pool up; allocations that were not freed keep their memory until they are."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            call("cuMemPoolDestroy", handle)


class PinnedBuffer(Closing):
    """Page-locked host memory; `array` (uint8, [num_bytes]) views it until `close()`."""

    def __init__(self, num_bytes: int) -> None:
        assert num_bytes > 0, num_bytes
        self.num_bytes = num_bytes
        flag = driver_api().CU_MEMHOSTALLOC_PORTABLE  # for every context
        self.address = int(call("cuMemHostAlloc", num_bytes, flag))
        memory = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.array: np.ndarray = np.ctypeslib.as_array(memory)

    def close(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            self.array = np.empty(0, np.uint8)
            call("cuMemFreeHost", address)


def copy_to_device(dst: int, src: np.ndarray, stream: Stream) -> None:
    """Copies a C-contiguous array to address `dst`; from pinned memory it runs in the stream.

    A pinned `src` must not change until the stream has passed the copy.
    """
    call("cuMemcpyHtoDAsync", dst, _address(src), src.nbytes, stream.handle)


def copy_to_host(dst: np.ndarray, src: int, stream: Stream) -> None:
    """Copies `dst.nbytes` bytes from address `src` into a C-contiguous array, in the stream."""
    call("cuMemcpyDtoHAsync", _address(dst), src, dst.nbytes, stream.handle)


def copy_device(dst: int, src: int, num_bytes: int, stream: Stream) -> None:
    """Copies `num_bytes` from device address `src` to `dst`, in the stream."""
    call("cuMemcpyDtoDAsync", dst, src, num_bytes, stream.handle)


class BatchCopy:
    """Many copies between pinned and device memory in one call, where the driver can."""

    def __init__(self) -> None:
        cu = driver_api()
        self._attributes = cu.CUmemcpyAttributes()
        # Sources are read when the stream gets there, as by any other copy.
        self._attributes.srcAccessOrder = (
            cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        )
        self._supported = True

    def __call__(self, pieces: Sequence[tuple[int, int, int]], stream: Stream) -> None:
        """Queues the copies (target address, source address, bytes), in no order among them."""
        if self._supported:
            pointer = driver_api().CUdeviceptr
            targets, sources, sizes = zip(*pieces, strict=True)
            self._supported = succeeds(
                "cuMemcpyBatchAsync",
                [pointer(address) for address in targets],
                [pointer(address) for address in sources],
                list(sizes),
                len(pieces),
                [self._attributes],
                [0],
                1,
                stream.handle,
                unless="CUDA_ERROR_NOT_SUPPORTED",
            )
            if self._supported:
                return
            logger.info("the driver has no batches of copies here: they go one by one")
        for target, source, num_bytes in pieces:
            call("cuMemcpyAsync", target, source, num_bytes, stream.handle)


def copy_2d_to_device(
    dst: int,
    dst_pitch: int,
    src: np.ndarray,
    src_pitch: int,
    width: int,
    height: int,
    stream: Stream,
) -> None:
    """Copies `height` rows of `width` bytes; rows start a pitch (bytes) apart on each side."""
    cu = driver_api()
    copy = cu.CUDA_MEMCPY2D()
    copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch = _address(src), src_pitch
    copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch = dst, dst_pitch
    copy.WidthInBytes, copy.Height = width, height
    call("cuMemcpy2DAsync", copy, stream.handle)


def memset(dst: int, value: int, num_bytes: int, stream: Stream) -> None:
    """Sets `num_bytes` bytes from address `dst` on to `value` (0 to 255), in the stream."""
    call("cuMemsetD8Async", dst, value, num_bytes, stream.handle)


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous, "copies need a contiguous array"
    return array.ctypes.data
