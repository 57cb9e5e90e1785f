"""The device pool with its budget: the one source of device memory, and how it runs out."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm.driver.calls import CudaError
from tinyvllm.driver.device import Device, Stream
from tinyvllm.driver.memory import MemPool, PoolUsage
from tinyvllm.memory.budget import MemoryPlan
from tinyvllm.util import Closing, align_up, format_bytes

GRANULARITY = 32 << 20  # bytes; the driver grows a pool in pieces of this size


class OutOfMemoryError(RuntimeError):
    """An allocation does not fit; the message says what was asked for, what is in use and what
    to change."""


@dataclass(frozen=True)
class PoolStats(PoolUsage):
    """What the pool holds and has handed out, and its limits, in bytes."""

    budget: int
    threshold: int


def planned_usage(plan: MemoryPlan, awake: bool = True) -> PoolStats:
    """What a pool holds that was given all of a plan at once and, unless `awake`, lost it since.

    Stands for the pool where there is none: executors without a GPU follow the same plan.
    """
    peak = plan.fixed + plan.kv
    size = peak if awake else 0
    return PoolStats(size, peak, size, peak, plan.budget, plan.threshold)


class DevicePool(Closing):
    """A pool that hands out at most `budget_bytes` and keeps freed memory up to a threshold.

    `release_threshold` is that threshold as a fraction of the budget. The reuse flags are those
    of `MemPool`. Allocation is in stream order: an address may be used by work that its stream
    is given afterwards, and by other streams once they wait on an event of it.
    """

    def __init__(
        self,
        device: Device,
        budget_bytes: int,
        release_threshold: float = 0.9,
        *,
        reuse_follow_event_dependencies: bool = True,
        reuse_allow_opportunistic: bool = True,
        reuse_allow_internal_dependencies: bool = True,
    ) -> None:
        self.budget = budget_bytes
        self.threshold = int(budget_bytes * release_threshold)
        self._pool = MemPool(
            device,
            self.threshold,
            reuse_follow_event_dependencies=reuse_follow_event_dependencies,
            reuse_allow_opportunistic=reuse_allow_opportunistic,
            reuse_allow_internal_dependencies=reuse_allow_internal_dependencies,
            max_bytes=align_up(budget_bytes, GRANULARITY),
        )
        # Bound once: look-ups count where an allocation takes two microseconds.
        self._alloc, self._free = self._pool.alloc, self._pool.free
        self._device = device
        self._sizes: dict[int, int] = {}
        self._used = 0  # in host order, so that the budget needs no question to the driver

    def alloc(self, num_bytes: int, stream: Stream) -> int:
        """Address of `num_bytes` (> 0). Raises OutOfMemoryError when they do not fit."""
        assert num_bytes > 0, num_bytes
        used = self._used + num_bytes
        if used > self.budget:
            raise self._out_of_memory(num_bytes)
        try:
            address = self._alloc(num_bytes, stream)
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            address = self._alloc_after_trim(num_bytes, stream)
        self._sizes[address] = num_bytes
        self._used = used
        return address

    def _alloc_after_trim(self, num_bytes: int, stream: Stream) -> int:
        # Memory whose free the device has not reached yet cannot be trimmed: let it get there.
        self._device.synchronize()
        self._pool.trim_to(0)
        try:
            return self._pool.alloc(num_bytes, stream)
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise self._out_of_memory(num_bytes) from error

    def free(self, address: int, stream: Stream) -> None:
        """Frees an allocation after the work that `stream` was given so far."""
        self._used -= self._sizes.pop(address)
        self._free(address, stream)

    def trim(self) -> None:
        """Gives all unused memory back to the driver."""
        self._pool.trim_to(0)

    def stats(self) -> PoolStats:
        return PoolStats(**vars(self._pool.usage()), budget=self.budget, threshold=self.threshold)

    def close(self) -> None:
        """Waits for the device and returns all memory, also what was not freed."""
        if self._sizes:
            self._device.synchronize()
        for address in self._sizes:
            self._pool.free_now(address)
        self._sizes.clear()
        self._used = 0
        self._pool.close()

    def _out_of_memory(self, num_bytes: int) -> OutOfMemoryError:
        stats = self.stats()
        return OutOfMemoryError(
            f"out of device memory: {format_bytes(num_bytes)} requested with "
            f"{format_bytes(self._used)} in use and {format_bytes(stats.reserved)} reserved of a "
            f"budget of {format_bytes(self.budget)}; lower max_num_batched_tokens, max_num_seqs "
            "or max_model_len, raise gpu_memory_utilization, or free memory that other programs "
            "hold on this GPU"
        )
