"""What the engine is doing and has done, in numbers: one frozen snapshot for callers and logs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tinyvllm.engine.request import Request
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.pool import PoolStats
from tinyvllm.memory.swapper import Swapper


@dataclass(frozen=True)
class SwapUsage:
    """The swap space (bytes) and the copies between it and the device, since the engine started.

    A rate is bytes a second while copies run: `out` to the host, `in` to the device. The plain
    rates are those of one large copy, measured with the first slab that was pinned; 0 before.
    """

    total_bytes: int = 0  # of the swap space, pinned or not
    pinned_bytes: int = 0
    used_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    out_seconds: float = 0.0  # that copies took
    in_seconds: float = 0.0
    plain_out_rate: float = 0.0
    plain_in_rate: float = 0.0
    num_stalls: int = 0  # slabs that were pinned, while the device stood still
    stall_seconds: float = 0.0

    @property
    def out_rate(self) -> float:
        """Bytes a second to the host, while copies ran."""
        return self.out_bytes / self.out_seconds if self.out_seconds else 0.0

    @property
    def in_rate(self) -> float:
        """Bytes a second to the device, while copies ran."""
        return self.in_bytes / self.in_seconds if self.in_seconds else 0.0

    def since(self, before: SwapUsage) -> SwapUsage:
        """The same, with what was copied and waited for after `before` was taken."""
        return replace(
            self,
            out_bytes=self.out_bytes - before.out_bytes,
            in_bytes=self.in_bytes - before.in_bytes,
            out_seconds=self.out_seconds - before.out_seconds,
            in_seconds=self.in_seconds - before.in_seconds,
            num_stalls=self.num_stalls - before.num_stalls,
            stall_seconds=self.stall_seconds - before.stall_seconds,
        )

    @property
    def copy_seconds(self) -> float:
        """Seconds that copies took, both ways."""
        return self.out_seconds + self.in_seconds


@dataclass(frozen=True)
class EngineStats:
    """A snapshot: states are those of now, counts are since the engine started.

    Requests are counted by sequence, so one with n=2 counts twice. Of the KV blocks,
    used + cached + free = total; a block that several sequences share is used once.
    """

    num_requests_running: int
    num_requests_waiting: int  # not yet begun, or to be computed again
    num_requests_swapped: int  # with K and V in the swap space, to return
    pool: PoolStats  # on the CPU simulated: all that the memory plan gives, for good
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int  # not used, contents kept for equal prefixes
    kv_blocks_free: int
    kv_slots_used: int  # token places of the used blocks
    kv_slots_empty: int  # those of them without a token
    swap: SwapUsage
    num_preemptions_swap: int
    num_preemptions_recompute: int
    prefix_cache_queries: int  # tokens of sequences that began, or came back, and may share
    prefix_cache_hits: int  # of these, not computed
    prompt_tokens: int  # of the requests that began, each prompt once
    prefill_tokens: int  # computed as prompts, what preemptions repeated included, hits left out
    generation_tokens: int
    num_steps: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, from 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total

    @property
    def fragmentation(self) -> float:
        """Share of the token places of used blocks that hold no token, from 0 to 1."""
        return self.kv_slots_empty / self.kv_slots_used if self.kv_slots_used else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the queried tokens found in the prefix cache, from 0 to 1."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_hits else 0.0


def swap_usage(swapper: Swapper | None) -> SwapUsage:
    """Of an engine's swap space; all 0 without one."""
    if swapper is None:
        return SwapUsage()
    space, stats = swapper.space, swapper.stats
    pinned = sum(map(space.slab_blocks, range(len(stats.stalls))))
    return SwapUsage(
        total_bytes=space.num_blocks * space.block_bytes,
        pinned_bytes=pinned * space.block_bytes,
        used_bytes=space.num_used * space.block_bytes,
        out_bytes=stats.bytes_out,
        in_bytes=stats.bytes_in,
        out_seconds=stats.seconds_out,
        in_seconds=stats.seconds_in,
        plain_out_rate=stats.plain_out_rate or 0.0,
        plain_in_rate=stats.plain_in_rate or 0.0,
        num_stalls=len(stats.stalls),
        stall_seconds=sum(stats.stalls),
    )


def empty_slots(blocks: BlockManager, holders: list[Request]) -> int:
    """Token places without a token in the blocks that these requests hold, exactly.

    A token counts from the moment that the step which writes it, or the copy back from the swap
    space, is scheduled. Blocks that are shared are full, so an empty place has one holder: nothing
    is counted twice. Blocks that only a copy to the swap space still holds are taken as full.
    """
    size, groups = blocks.block_size, blocks.num_groups
    return groups * sum(
        len(request.block_ids[0]) * size - request.num_computed_tokens for request in holders
    )
