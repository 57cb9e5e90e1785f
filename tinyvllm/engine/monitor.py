"""Counts what the steps do, writes a line of statistics now and then, warns when blocks run low."""

from __future__ import annotations

import time
from collections.abc import Callable

from tinyvllm.engine.backend import Backend
from tinyvllm.engine.preemption import RECOMPUTE, SWAP
from tinyvllm.engine.request import RequestStatus
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.engine.stats import EngineStats, empty_slots, swap_usage
from tinyvllm.engine.step import ScheduledStep
from tinyvllm.util import format_bytes, logger

LOG_INTERVAL = 10.0  # seconds with something running from one line to the next
LOW_BLOCKS = 0.10  # share of free and cached blocks under which a warning is due
ENOUGH_BLOCKS = 0.15  # the share that must be reached before the next warning
BUSY_COPIES = 0.80  # share of an interval with copies from which on they may be the bottleneck


class Monitor:
    """Told of each step by the engine; costs a microsecond or two a step, whatever its rows.

    With `log`, it logs a line of statistics after each `LOG_INTERVAL` in which something ran, and
    a warning each time that few blocks are left; without, it only counts. `clock` gives seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        *,
        log: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps = 0
        self.prompt_tokens = 0
        self.prefill_tokens = 0
        self._scheduler = scheduler
        self._backend = backend
        self._log = log
        self._clock = clock
        self._low = LOW_BLOCKS * scheduler.blocks.num_blocks
        self._enough = ENOUGH_BLOCKS * scheduler.blocks.num_blocks
        self._warned = False
        self._began = self._now = clock()  # of the interval; of the last step
        self._last: EngineStats | None = None  # at the last line, with `log`

    def resumed(self) -> None:
        """Leaves the time since the last step out of the interval; comes before the first request
        after a time in which there was none."""
        now = self._clock()
        self._began += now - self._now
        self._now = now
        if self._log and self._last is None:
            self._last = self.stats()

    def launched(self, step: ScheduledStep) -> None:
        """Counts a step that was given to the device."""
        self.num_steps += 1
        self.prefill_tokens += step.num_tokens - step.num_decodes
        for row in step.joins:
            # Once a request: neither for its other samples nor again after a preemption.
            if row.request.index == 0 and row.request.num_preemptions == 0:
                self.prompt_tokens += len(row.request.prompt_token_ids)

    def stepped(self) -> None:
        """Warns and logs if that is due; comes at the end of each step."""
        if not self._log:
            return
        available = self._scheduler.blocks.num_free
        if available < self._low:
            if not self._warned:
                self._warned = True
                self._warn(available)
        elif self._warned and available >= self._enough:
            self._warned = False
        self._now = now = self._clock()
        if now - self._began >= LOG_INTERVAL:
            stats = self.stats()
            assert self._last is not None, "`resumed` comes before the first step"
            logger.info("%s", log_line(self._last, stats, now - self._began))
            self._last, self._began = stats, now

    def stats(self) -> EngineStats:
        """A snapshot of now."""
        scheduler = self._scheduler
        blocks, cache = scheduler.blocks, scheduler.tables.cache
        num_swapped = sum(r.status is RequestStatus.SWAPPED for r in scheduler.waiting)
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting) - num_swapped,
            num_requests_swapped=num_swapped,
            pool=self._backend.pool_stats(),
            kv_blocks_total=blocks.num_blocks,
            kv_blocks_used=blocks.num_used,
            kv_blocks_cached=blocks.num_cached,
            kv_blocks_free=blocks.num_free - blocks.num_cached,
            kv_slots_used=blocks.num_used * blocks.block_size,
            kv_slots_empty=empty_slots(blocks, scheduler.running),
            swap=swap_usage(scheduler.swaps.swapper),
            num_preemptions_swap=scheduler.num_preemptions[SWAP],
            num_preemptions_recompute=scheduler.num_preemptions[RECOMPUTE],
            prefix_cache_queries=cache.num_queried_tokens if cache else 0,
            prefix_cache_hits=cache.num_hit_tokens if cache else 0,
            prompt_tokens=self.prompt_tokens,
            prefill_tokens=self.prefill_tokens,
            generation_tokens=scheduler.num_generated_tokens,
            num_steps=self.num_steps,
        )

    def _warn(self, available: int) -> None:
        blocks = self._scheduler.blocks
        logger.warning(
            "KV cache: %d of %d blocks are left (%.1f %%, %d of them cached): running sequences "
            "will soon be preempted. Lower max_num_seqs or preemption_threshold, or raise "
            "gpu_memory_utilization, if this lasts.",
            available,
            blocks.num_blocks,
            100 * available / blocks.num_blocks,
            blocks.num_cached,
        )


def swap_is_bottleneck(last: EngineStats, now: EngineStats, seconds: float) -> bool:
    """Whether swap bandwidth held the engine up in the `seconds` between two snapshots.

    It did when blocks were being copied in more than `BUSY_COPIES` of the time and, at the end,
    sequences that are swapped out wait to return: copies that nobody waits for cost nothing, and
    sequences that wait with the link idle wait for blocks, not for copies.
    """
    share = now.swap.since(last.swap).copy_seconds / seconds
    return share > BUSY_COPIES and now.num_requests_swapped > 0


def log_line(last: EngineStats, now: EngineStats, seconds: float) -> str:
    """The statistics of `now` in a line; rates are those of the `seconds` since `last`."""
    rate_in = (now.prefill_tokens - last.prefill_tokens) / seconds
    rate_out = (now.generation_tokens - last.generation_tokens) / seconds
    pool, swap = now.pool, now.swap.since(last.swap)
    parts = [
        f"Avg prompt throughput: {rate_in:.1f} tokens/s",
        f"Avg generation throughput: {rate_out:.1f} tokens/s",
        f"Running: {now.num_requests_running} reqs",
        f"Waiting: {now.num_requests_waiting} reqs",
        f"Swapped: {now.num_requests_swapped} reqs",
        f"KV cache usage: {now.kv_cache_usage:.1%}",
        f"Fragmentation: {now.fragmentation:.1%}",
        f"Prefix cache hit rate: {now.prefix_cache_hit_rate:.1%}",
        f"Pool: {format_bytes(pool.used)} used of {format_bytes(pool.reserved)} reserved, "
        f"peak {format_bytes(pool.reserved_high)}",
    ]
    if swap.out_bytes or swap.in_bytes:
        parts.append(
            f"Swap out / in: {swap.out_rate / 1e9:.1f} / {swap.in_rate / 1e9:.1f} GB/s of "
            f"{swap.plain_out_rate / 1e9:.1f} / {swap.plain_in_rate / 1e9:.1f}, "
            f"{format_bytes(swap.used_bytes)} of {format_bytes(swap.total_bytes)} used"
        )
    if now.num_preemptions_swap or now.num_preemptions_recompute:
        parts.append(
            f"Preemptions: {now.num_preemptions_swap} swap, "
            f"{now.num_preemptions_recompute} recompute"
        )
    if swap_is_bottleneck(last, now, seconds):
        parts.append("swap bandwidth is the bottleneck")
    return ", ".join(parts)
