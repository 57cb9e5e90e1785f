"""Copies of KV blocks between the device and the swap space: interface, slabs and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinyvllm.driver.calls import CudaError
from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.util import Closing, InputError, format_bytes, logger

Pairs = Sequence[tuple[int, int]]  # device block, host block


class Ticket(Protocol):
    """A batch of copies under way. Both methods raise CudaError where the copies have failed."""

    def done(self) -> bool:
        """Whether the copies are complete; never waits."""
        ...

    def wait(self) -> None:
        """Waits until they are."""
        ...


@dataclass
class SwapStats:
    """What has been copied, in bytes and seconds of the copies that are complete.

    stalls: for each slab that was pinned, the seconds that the device stood still for it.
    plain_out_rate, plain_in_rate: bytes a second of one plain pinned copy to and from the host,
        measured with the first slab; None before.
    """

    bytes_out: int = 0
    bytes_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    stalls: list[float] = field(default_factory=list)
    plain_out_rate: float | None = None
    plain_in_rate: float | None = None

    def count(self, num_bytes: int, seconds: float, *, out: bool) -> None:
        """Adds a batch that is complete."""
        if out:
            self.bytes_out += num_bytes
            self.seconds_out += seconds
        else:
            self.bytes_in += num_bytes
            self.seconds_in += seconds


class Swapper(Protocol):
    """Moves KV blocks; batches are carried out in the order in which they were given.

    A batch begins after the work that the device was given before, so blocks may be copied out
    that the last launched step writes, and copied in to where it still reads. The caller leaves
    the blocks of a batch alone until its ticket is done.
    """

    space: SwapSpace
    stats: SwapStats

    def allocate(self, n: int) -> list[int] | None:
        """n host blocks with memory behind them; None when there are not so many."""
        ...

    def swap_out(self, pairs: Pairs) -> Ticket:
        """Starts copying device blocks to host blocks. Raises CudaError."""
        ...

    def swap_in(self, pairs: Pairs) -> Ticket:
        """Starts copying host blocks to device blocks. Raises CudaError."""
        ...

    def close(self) -> None:
        """Waits for the copies under way and frees the host memory."""
        ...


def merge_runs(pairs: Pairs, blocks_per_slab: int) -> list[tuple[int, int, int]]:
    """Pairs as pieces (device block, host block, blocks): neighbours on both sides are joined.

    A piece stays within one slab.
    """
    pieces: list[tuple[int, int, int]] = []
    for device, host in pairs:
        if pieces and host % blocks_per_slab:
            first_device, first_host, count = pieces[-1]
            if device == first_device + count and host == first_host + count:
                pieces[-1] = first_device, first_host, count + 1
                continue
        pieces.append((device, host, 1))
    return pieces


class Slabs(Closing):
    """The memory of a swap space: slabs that come when a block of theirs is first allocated."""

    def __init__(self, space: SwapSpace) -> None:
        self.space = space
        self.stats = SwapStats()
        self.slabs: list[Any] = []

    def new_slab(self, num_bytes: int) -> Any:
        """A slab of memory. Raises CudaError when there is none."""
        raise NotImplementedError

    def reserve(self, num_slabs: int) -> None:
        """Makes the first `num_slabs` slabs. Raises CudaError when memory runs out."""
        while len(self.slabs) < num_slabs:
            blocks = self.space.slab_blocks(len(self.slabs))
            self.slabs.append(self.new_slab(blocks * self.space.block_bytes))

    def reserve_all(self) -> None:
        """Makes all slabs. Raises InputError, with the numbers, when memory runs out."""
        try:
            self.reserve(self.space.num_slabs)
        except CudaError as error:
            size = self.space.block_bytes
            wanted = self.space.num_blocks * size
            pinned = len(self.slabs) * self.space.blocks_per_slab * size
            raise InputError(
                f"swap_space={wanted / (1 << 30):.2f}: {format_bytes(pinned)} could be pinned, not "
                f"{format_bytes(wanted)} ({error.name}); lower it, or leave out pin_swap_space"
            ) from error

    def allocate(self, n: int) -> list[int] | None:
        """n host blocks with memory behind them; None when there are not so many.

        Where the host's memory runs out the swap space ends with the slabs that there are.
        """
        blocks = self.space.allocate(n)
        if not blocks:
            return blocks
        try:
            self.reserve(max(blocks) // self.space.blocks_per_slab + 1)
        except CudaError as error:
            self.space.free(blocks)
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            self.space.shrink(len(self.slabs) * self.space.blocks_per_slab)
            size = format_bytes(self.space.num_blocks * self.space.block_bytes)
            logger.warning("no more host memory can be pinned: the swap space stays at %s", size)
            return None
        return blocks
