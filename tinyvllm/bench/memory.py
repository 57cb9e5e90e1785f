"""`tinyvllm bench memory`: what allocations and copies of the memory layers take."""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tinyvllm.api.llm import LLM
from tinyvllm.bench.latency import MEASURED_STEPS, decode_times
from tinyvllm.bench.synthetic import check_steps
from tinyvllm.config import EngineConfig
from tinyvllm.driver.calls import call, driver_api
from tinyvllm.driver.device import Device, Event, Stream, cuda_unavailable
from tinyvllm.driver.memory import MemPool, PinnedBuffer, copy_to_device, copy_to_host
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.memory.pool import DevicePool
from tinyvllm.memory.swapper import Pairs, Swapper, Ticket
from tinyvllm.util import InputError

MIB = 1 << 20
COPY_BYTES = 256 * MIB  # of one plain copy
MOVED_BYTES = 256 * MIB  # of the blocks that are swapped to and fro
BATCH_BYTES = 32 * MIB  # given to the swapper at once: a sequence of 1024 tokens of 32 KiB


@dataclass(frozen=True)
class AllocationTimes:
    """Microseconds that 1 MiB takes to allocate and free, on the host."""

    pool_us: float
    binding_us: float  # the two driver functions that the pool calls, called by themselves
    driver_us: float  # cuMemAlloc and cuMemFree


@dataclass(frozen=True)
class SwapRow:
    """Swapping at one block size: bytes a second while copies ran, and a decode step beside it."""

    block_size: int
    block_bytes: int
    out_idle: float
    in_idle: float
    out_decoding: float
    in_decoding: float
    step_ms: float  # without copies
    step_out_ms: float
    step_in_ms: float
    stall_ms: float  # to pin one slab while decoding, the median
    slab_bytes: int


def bench_memory(
    config: EngineConfig, block_sizes: Sequence[int], batch: int, context: int, *, as_json: bool
) -> None:
    """Measures allocations, plain copies, and swapping at each block size.

    Swapped blocks are in random order, so that none are joined to larger copies; while a decode of
    `batch` sequences goes on, and while nothing else does.
    """
    check_steps([batch], [context])
    for block_size in block_sizes:
        replace(config, block_size=block_size)  # refuses those that do not exist
    if reason := cuda_unavailable():
        raise InputError(f"bench memory needs a GPU: {reason}")
    index = config.gpu_index or 0
    with Device(index) as device, Stream() as stream:
        name = device.info.name
        allocation = allocation_times(device, stream)
        plain_out, plain_in = plain_rates(device, stream)
    if not as_json:
        print(
            f"{name}: 1 MiB allocated and freed in {allocation.pool_us:.2f} us by the pool (the "
            f"bare bindings {allocation.binding_us:.2f}), {allocation.driver_us:.1f} us by "
            f"cuMemAlloc and cuMemFree\n"
            f"plain pinned copies: {plain_out / 1e9:.1f} GB/s out, {plain_in / 1e9:.1f} GB/s in\n"
            f"swapping, as a share of these, and a decode step of {batch} sequences\n"
            f"{'block':>5} {'KiB':>5} {'out':>6} {'in':>6} {'out decoding':>13} "
            f"{'in decoding':>12} {'ms/step':>8} {'+ out':>7} {'+ in':>7} {'stall ms/slab':>14}",
            flush=True,
        )
    rows = []
    for block_size in block_sizes:
        options = replace(
            config,
            block_size=block_size,
            max_num_seqs=max(config.max_num_seqs, 4 * batch),  # more KV blocks than they need
            max_model_len=context + MEASURED_STEPS,
            preemption_mode="swap",
            pin_swap_space=False,
        )
        with LLM(**asdict(options)) as llm:
            row = measure_swapping(llm.engine, batch, context)
        rows.append(row)
        if not as_json:
            print(
                f"{row.block_size:>5} {row.block_bytes >> 10:>5} {row.out_idle / plain_out:>6.1%} "
                f"{row.in_idle / plain_in:>6.1%} {row.out_decoding / plain_out:>13.1%} "
                f"{row.in_decoding / plain_in:>12.1%} {row.step_ms:>8.3f} {row.step_out_ms:>7.3f} "
                f"{row.step_in_ms:>7.3f} {row.stall_ms:>14.1f}",
                flush=True,
            )
    if as_json:
        result = {"device": name, **asdict(allocation), "plain_out": plain_out}
        print(json.dumps({**result, "plain_in": plain_in, "rows": [asdict(row) for row in rows]}))


def allocation_times(device: Device, stream: Stream, count: int = 500) -> AllocationTimes:
    """Medians over 30 rounds of `count` allocations (a tenth for the driver's)."""
    api = driver_api()

    def median_us(once: Callable[[], object], count: int) -> float:
        rounds = []
        for _ in range(30):
            stream.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                once()
            rounds.append((time.perf_counter() - start) / count * 1e6)
        return statistics.median(rounds)

    with DevicePool(device, 64 * MIB) as pool, MemPool(device, 64 * MIB) as bare:
        alloc, free, handle = api.cuMemAllocFromPoolAsync, api.cuMemFreeAsync, stream.handle
        binding_us = median_us(lambda: free(alloc(MIB, bare.handle, handle)[1], handle), count)
        pool_us = median_us(lambda: pool.free(pool.alloc(MIB, stream), stream), count)
    driver_us = median_us(lambda: call("cuMemFree", call("cuMemAlloc", MIB)), count // 10)
    return AllocationTimes(pool_us, binding_us, driver_us)


def plain_rates(device: Device, stream: Stream) -> tuple[float, float]:
    """Bytes a second of one large copy between pinned and device memory: to the host, from it."""
    rates = []
    with (
        DevicePool(device, COPY_BYTES) as pool,
        PinnedBuffer(COPY_BYTES) as host,
        Event(timing=True) as start,
        Event(timing=True) as end,
    ):
        address = pool.alloc(COPY_BYTES, stream)
        copies: tuple[Callable[[], None], ...] = (
            lambda: copy_to_host(host.array, address, stream),
            lambda: copy_to_device(address, host.array, stream),
        )
        for copy in copies:
            times = []
            for _ in range(5):
                start.record(stream)
                copy()
                end.record(stream)
                end.synchronize()
                times.append(end.elapsed_ms(start) / 1e3)
            rates.append(COPY_BYTES / statistics.median(times))
        pool.free(address, stream)
        stream.synchronize()
    return rates[0], rates[1]


def measure_swapping(engine: LLMEngine, batch: int, context: int) -> SwapRow:
    """Swaps free blocks of an engine to and fro, by its own swapper, with and without steps."""
    swapper, blocks = engine.backend.swapper, engine.scheduler.blocks
    if swapper is None:
        raise InputError("swap_space=0: there is nothing to measure")
    space = swapper.space
    # So many that the sequences are not preempted.
    decoding = batch * blocks.blocks_for(context + MEASURED_STEPS)
    spare = int(engine.config.preemption_threshold * blocks.num_blocks) - decoding
    if spare < 1:
        raise InputError(
            f"batch {batch}, context {context}: {decoding} of {blocks.num_blocks} KV blocks are "
            "needed, which leaves none to swap"
        )
    wanted = min(MOVED_BYTES // space.block_bytes, space.num_blocks, spare)
    count = max(1, BATCH_BYTES // space.block_bytes)
    device_blocks = blocks.allocate(wanted)
    assert device_blocks, "no sequence runs"
    np.random.default_rng(0).shuffle(device_blocks)
    decode_times(engine, batch, context)  # captures the graph
    step, _ = decode_times(engine, batch, context)

    # The slabs come one at a time, each while steps are under way.
    host_blocks: list[int] = []

    def pin_next() -> None:
        if len(host_blocks) < wanted:
            more = min(space.blocks_per_slab, wanted - len(host_blocks))
            host_blocks.extend(swapper.allocate(more) or ())

    decode_times(engine, batch, context, pin_next)
    stalls = list(swapper.stats.stalls)
    pairs = list(zip(device_blocks, host_blocks, strict=False))
    assert pairs, "the log says that no host memory can be pinned"
    batches = [pairs[i : i + count] for i in range(0, len(pairs), count)]

    out = Traffic(swapper, batches, swapper.swap_out)
    step_out, _ = decode_times(engine, batch, context, out.keep_going)
    out_decoding = out.finish()
    back = Traffic(swapper, batches, swapper.swap_in)
    step_in, _ = decode_times(engine, batch, context, back.keep_going)
    in_decoding = back.finish()
    out_idle = Traffic(swapper, batches, swapper.swap_out).run_once()
    in_idle = Traffic(swapper, batches, swapper.swap_in).run_once()
    space.free(host_blocks)
    blocks.free(device_blocks)
    return SwapRow(
        block_size=blocks.block_size,
        block_bytes=space.block_bytes,
        out_idle=out_idle,
        in_idle=in_idle,
        out_decoding=out_decoding,
        in_decoding=in_decoding,
        step_ms=step * 1e3,
        step_out_ms=step_out * 1e3,
        step_in_ms=step_in * 1e3,
        stall_ms=statistics.median(stalls) * 1e3,
        slab_bytes=space.slab_blocks(0) * space.block_bytes,
    )


class Traffic:
    """Copies in one direction, batch after batch of the same ones, two of them under way."""

    def __init__(
        self, swapper: Swapper, batches: Sequence[Pairs], start: Callable[[Pairs], Ticket]
    ) -> None:
        self._swapper, self._batches, self._start = swapper, batches, start
        self._under_way: deque[Ticket] = deque()
        self._next = 0
        self._before = replace(swapper.stats)

    def keep_going(self) -> None:
        """Starts batches in place of those that are done; never waits."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        while len(self._under_way) < 2:
            self._under_way.append(self._start(self._batches[self._next]))
            self._next = (self._next + 1) % len(self._batches)

    def run_once(self) -> float:
        """All batches, with nothing else to do; bytes a second."""
        for batch in self._batches:
            self._under_way.append(self._start(batch))
        return self.finish()

    def finish(self) -> float:
        """Waits for the last copy; bytes a second of all, while copies ran."""
        while self._under_way:
            self._under_way.popleft().wait()
        before, after = self._before, self._swapper.stats
        num_bytes = after.bytes_out - before.bytes_out + after.bytes_in - before.bytes_in
        seconds = after.seconds_out - before.seconds_out + after.seconds_in - before.seconds_in
        return num_bytes / seconds
