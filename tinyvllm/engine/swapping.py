"""Which blocks of which requests have copies in the swap space, and the copies under way."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from tinyvllm.driver.calls import CudaError
from tinyvllm.engine.request import Request
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.swapper import Pairs, Swapper, Ticket


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copies under way for one request; they are a user of each of their blocks."""

    request: Request
    ticket: Ticket
    pairs: Pairs


class Swaps:
    """Moves blocks of requests to and from the swap space.

    `Request.host_block_ids` are the copies of the first blocks of its tables. A copy under way is
    a user of its blocks on both sides: whatever becomes of the request, they are free only once
    the copy is done. Without a swapper there is no swap space.
    """

    def __init__(self, blocks: BlockManager, swapper: Swapper | None) -> None:
        self.blocks = blocks
        self.swapper = swapper
        self._under_way: deque[_Copy] = deque()
        self.users: Counter[int] = Counter()  # of device blocks: copies under way

    @property
    def num_free(self) -> int:
        """Free blocks of the swap space."""
        return self.swapper.space.num_free if self.swapper is not None else 0

    @property
    def num_used(self) -> int:
        """Blocks of the swap space with users."""
        return self.swapper.space.num_used if self.swapper is not None else 0

    @property
    def num_pending(self) -> int:
        """Device blocks that are free once the copies under way are done."""
        count = self.blocks.ref_count
        return sum(count(block) == users for block, users in self.users.items())

    def copy_out(self, request: Request, num_blocks: int) -> bool:
        """Starts copying what of the first blocks of each table has no copy yet.

        False when the swap space is full. Raises CudaError.
        """
        first = request.num_host_blocks
        more = num_blocks - first
        if more <= 0:
            return True
        if self.swapper is None:
            return False
        taken = self.swapper.allocate(more * self.blocks.num_groups)
        if taken is None:
            return False
        if not request.host_block_ids:
            request.host_block_ids = [[] for _ in request.block_ids]
        device: list[int] = []
        for group, table in enumerate(request.block_ids):
            request.host_block_ids[group] += taken[group * more : (group + 1) * more]
            device += table[first:num_blocks]
        pairs = list(zip(device, taken, strict=True))
        self._begin(request, self.swapper.swap_out(pairs), pairs)
        return True

    def copy_in(self, request: Request, first: int) -> None:
        """Starts copying back all blocks of each table from number `first` on.

        Raises CudaError.
        """
        assert self.swapper is not None
        pairs = [
            pair
            for table, host in zip(request.block_ids, request.host_block_ids, strict=True)
            for pair in zip(table[first:], host[first:], strict=True)
        ]
        if pairs:
            self._begin(request, self.swapper.swap_in(pairs), pairs)

    def release(self, request: Request) -> None:
        """Gives up the copies that a request has in the swap space."""
        if request.host_block_ids:
            assert self.swapper is not None
            self.swapper.space.free(chain.from_iterable(request.host_block_ids))
            request.host_block_ids = []

    def poll(self) -> list[tuple[Request, CudaError]]:
        """Frees the blocks of the copies that are done; returns those that failed."""
        failed = []
        while self._under_way:
            copy = self._under_way[0]
            try:
                if not copy.ticket.done():
                    break
            except CudaError as error:
                failed.append((copy.request, error))
            self._end(self._under_way.popleft())
        return failed

    def wait(self) -> None:
        """Waits for the oldest of the copies under way; `poll` says how it went."""
        if self._under_way:
            with suppress(CudaError):  # the ticket raises again when `poll` asks it
                self._under_way[0].ticket.wait()

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._under_way)

    @property
    def num_references(self) -> int:
        """Users of device blocks that the copies under way are."""
        return sum(self.users.values())

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise RuntimeError unless requests and copies are all users of host blocks."""
        if self.swapper is None:
            return
        space = self.swapper.space
        space.check_integrity()
        held = sum(len(table) for request in requests for table in request.host_block_ids)
        held += sum(len(copy.pairs) for copy in self._under_way)
        if held != space.num_references:
            raise RuntimeError(
                f"requests and copies hold {held} host blocks, counted {space.num_references}"
            )

    def _begin(self, request: Request, ticket: Ticket, pairs: Pairs) -> None:
        assert self.swapper is not None
        device, host = zip(*pairs, strict=True)
        self.blocks.incref(device)
        self.swapper.space.incref(host)
        self.users.update(device)
        request.num_copies += 1
        self._under_way.append(_Copy(request, ticket, pairs))

    def _end(self, copy: _Copy) -> None:
        assert self.swapper is not None
        device, host = zip(*copy.pairs, strict=True)
        for block in device:
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
        self.blocks.free(reversed(device))  # so that the end of a prefix is evicted first
        self.swapper.space.free(host)
        copy.request.num_copies -= 1
