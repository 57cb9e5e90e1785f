"""Whether a preempted sequence is swapped or computed again: the cost of both, measured."""

from __future__ import annotations

from tinyvllm.engine.block_tables import BlockTables
from tinyvllm.engine.request import Request
from tinyvllm.engine.swapping import Swaps

SWAP, RECOMPUTE = "swap", "recompute"
REMEMBERED = 2.0  # seconds of measured work after which older work counts half


class RateMeter:
    """Amount a second over the last seconds of measured work."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def rate(self) -> float | None:
        """None before anything is measured."""
        return self._amount / self._seconds if self._seconds else None

    def add(self, amount: float, seconds: float) -> None:
        """Adds work that has taken so long."""
        self._amount += amount
        self._seconds += seconds
        if self._seconds > REMEMBERED:
            self._amount /= 2
            self._seconds /= 2


def cheaper(
    preemption_mode: str,
    *,
    blocks_out: int,
    blocks_in: int,
    block_bytes: int,
    free_host_blocks: int,
    out_rate: float | None,
    in_rate: float | None,
    tokens: int,
    prefill_rate: float | None,
) -> tuple[str, str]:
    """SWAP or RECOMPUTE for a sequence, and the reason; pure.

    blocks_out: blocks that have no copy in the swap space yet, which has `free_host_blocks`.
    blocks_in: blocks to copy back on its return.
    out_rate, in_rate: bytes a second of copies each way; None: not measured yet.
    tokens: to compute again otherwise, at `prefill_rate` a second; None: not measured yet.
    """
    if preemption_mode == RECOMPUTE:
        return RECOMPUTE, "preemption_mode is recompute"
    if blocks_out > free_host_blocks:
        return RECOMPUTE, f"swap space full: {blocks_out} blocks needed, {free_host_blocks} free"
    if preemption_mode == SWAP:
        return SWAP, "preemption_mode is swap"
    if out_rate is None or in_rate is None or prefill_rate is None:
        # Swapping is the one whose cost has a bound from the start: the speed of the bus.
        return SWAP, "nothing is measured yet"
    swap = block_bytes * (blocks_out / out_rate + blocks_in / in_rate)
    recompute = tokens / prefill_rate
    reason = (
        f"{blocks_out} blocks out and {blocks_in} in take {swap * 1e3:.2f} ms, "
        f"{tokens} tokens again {recompute * 1e3:.2f} ms"
    )
    return (SWAP if swap <= recompute else RECOMPUTE), reason


class Preemption:
    """What is to become of a request that is preempted; `prefill_rate` in tokens a second."""

    def __init__(
        self, tables: BlockTables, swaps: Swaps, preemption_mode: str, prefill_rate: RateMeter
    ) -> None:
        self._tables, self._swaps, self._mode = tables, swaps, preemption_mode
        self._prefill_rate = prefill_rate

    def choose(self, request: Request, num_blocks: int) -> tuple[str, str]:
        """SWAP or RECOMPUTE, and why, for one of which the first blocks a table would be copied."""
        swapper = self._swaps.swapper
        if swapper is None:
            return RECOMPUTE, "there is no swap space"
        if request.returning:
            return SWAP, "its blocks are still in the swap space"
        if not request.decoding:
            return RECOMPUTE, "its prompt is not computed"
        if request.params.counted:
            return RECOMPUTE, "the counts of its tokens are on the device alone"
        if request.num_tokens == request.max_total_tokens:
            return RECOMPUTE, "it ends with the token in flight"
        groups, size = self._tables.blocks.num_groups, self._tables.blocks.block_size
        shared = self._tables.num_shared(request, self._swaps.users)
        return cheaper(
            self._mode,
            blocks_out=(num_blocks - request.num_host_blocks) * groups,
            blocks_in=(num_blocks - shared) * groups,
            block_bytes=swapper.space.block_bytes,
            free_host_blocks=swapper.space.num_free,
            out_rate=swapper.stats.plain_out_rate,
            in_rate=swapper.stats.plain_in_rate,
            tokens=request.num_tokens - shared * size,
            prefill_rate=self._prefill_rate.rate,
        )
