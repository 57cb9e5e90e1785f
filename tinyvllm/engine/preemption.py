"""Whether a preempted sequence is swapped or computed again: the cost of both, measured."""

from __future__ import annotations

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


def choose(
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
