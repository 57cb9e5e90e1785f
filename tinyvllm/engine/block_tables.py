"""The block tables of requests: what they share, how they grow, and when their blocks return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.prefix_cache import PrefixCache

TableEntry = tuple[int, int, int, int]  # group, slot, index in the table, block


@dataclass(slots=True)
class Plan:
    """How a waiting request would begin.

    start: its first tokens that need not be computed.
    shared: for each KV group, the full blocks that hold them and have other users, or are cached.
    copied: for each KV group the block, partly of those tokens, to copy to one of its own.
    num_blocks: blocks that come into use, from here to the last of its tokens.
    """

    start: int
    shared: list[list[int]]
    copied: list[int] = field(default_factory=list)
    num_blocks: int = 0


class BlockTables:
    """Gives requests their blocks, shares those that hold the same tokens, takes them back.

    A request writes only blocks of which it is the only user and which are not kept: the full
    blocks that it shares end before the first token that it computes, and a block is kept only
    when it is full.
    """

    def __init__(self, blocks: BlockManager, prefix_caching: bool) -> None:
        self.blocks = blocks
        self.cache = PrefixCache(blocks) if prefix_caching else None

    def plan(self, request: Request, parent: Request | None) -> Plan:
        """For a waiting request; with the prompt of `parent`, if given, whose blocks hold it.

        At least one token is left to compute, since its logits give the next.
        """
        size, groups = self.blocks.block_size, self.blocks.num_groups
        last = request.num_tokens - 1
        if parent is not None:
            assert parent.num_computed_tokens >= last, f"{parent} has not computed its prompt"
            full = last // size
            plan = Plan(last, [table[:full] for table in parent.block_ids])
            if last % size:
                plan.copied = [table[full] for table in parent.block_ids]
        # What a swapped request had to see of its tokens it has seen.
        elif self.cache is not None and (
            request.may_share or request.status is RequestStatus.SWAPPED
        ):
            path = self.cache.lookup(request.tokens(0, last))
            shared = [[entry.blocks[group] for entry in path] for group in range(groups)]
            plan = Plan(len(path) * size, shared)
        else:
            plan = Plan(0, [[] for _ in range(groups)])
        unused = sum(not self.blocks.ref_count(b) for table in plan.shared for b in table)
        own = self.blocks.blocks_for(request.num_tokens) - groups * len(plan.shared[0])
        plan.num_blocks = own + unused
        return plan

    def begin(
        self, request: Request, plan: Plan, new_blocks: list[TableEntry]
    ) -> list[tuple[int, int]]:
        """Carries a plan out for a request that has a slot; returns the copies (from, to)."""
        assert request.slot is not None
        for group, table in enumerate(plan.shared):
            self.blocks.incref(table)
            new_blocks += [(group, request.slot, i, block) for i, block in enumerate(table)]
        request.block_ids = plan.shared
        request.num_computed_tokens = plan.start
        request.num_kept_blocks = 0
        if request.num_preemptions == 0:
            request.num_cached_tokens = plan.start
        if self.cache is not None:
            request.cached_block = self.cache.root
            if request.may_share:
                self.cache.num_queried_tokens += request.num_tokens
                self.cache.num_hit_tokens += plan.start
        if not plan.copied:
            return []
        self.grow(request, plan.start, new_blocks)
        own = [table[-1] for table in request.block_ids]
        return list(zip(plan.copied, own, strict=True))

    def grow(self, request: Request, num_tokens: int, new_blocks: list[TableEntry]) -> None:
        """Extends a request's tables to hold `num_tokens`; the blocks must be free."""
        assert request.slot is not None
        have = len(request.block_ids[0])
        more = self.blocks.blocks_for(num_tokens) // self.blocks.num_groups - have
        for group, table in enumerate(request.block_ids):
            taken = self.blocks.allocate(more)
            assert taken is not None, f"{self.blocks.num_free} blocks are free, not {more}"
            table += taken
            for index, block in enumerate(taken, start=have):
                new_blocks.append((group, request.slot, index, block))

    def entries(self, request: Request) -> list[TableEntry]:
        """All entries of a request's tables."""
        assert request.slot is not None
        return [
            (group, request.slot, index, block)
            for group, table in enumerate(request.block_ids)
            for index, block in enumerate(table)
        ]

    def num_shared(self, request: Request, copying: Mapping[int, int]) -> int:
        """The first entries of a request's tables that the prefix cache has and others use too.

        copying: how many of the users of a block are copies.
        """
        if self.cache is None:
            return 0

        def shared(row: tuple[int, ...]) -> bool:
            users = (self.blocks.ref_count(b) - copying.get(b, 0) for b in row)
            return all(map(self.blocks.is_kept, row)) and min(users) > 1

        return sum(1 for _ in takewhile(shared, zip(*request.block_ids, strict=True)))

    def keep(self, request: Request, num_tokens: int) -> None:
        """Offers the full blocks of a request's first `num_tokens` tokens to the prefix cache.

        The values of these tokens are known, and steps that have been launched compute them.
        """
        size, first, end = (
            self.blocks.block_size,
            request.num_kept_blocks,
            num_tokens // self.blocks.block_size,
        )
        if self.cache is None or first >= end:
            return
        known = request.tokens(first * size, end * size)
        tables = zip(*[table[first:end] for table in request.block_ids], strict=True)
        for i, blocks in enumerate(tables):
            if request.cached_block is None:
                return
            tokens = tuple(known[i * size : (i + 1) * size])
            # None once another request's block, which stands for an equal one of this request in
            # the tree, is evicted: what follows it is not cached.
            request.cached_block = self.cache.extend(request.cached_block, tokens, blocks)
            request.num_kept_blocks += 1

    def release(self, request: Request) -> None:
        """Takes all of a request's blocks back."""
        for table in request.block_ids:
            self.blocks.free(reversed(table))  # so that the end of a prefix is evicted first
        request.block_ids = []
        request.cached_block = None

    def check_integrity(self, requests: list[Request], num_others: int = 0) -> None:
        """Raise RuntimeError unless the requests hold all blocks in use, and keep what is kept.

        num_others: users of blocks besides the requests.
        """
        self.blocks.check_integrity()
        held = sum(len(table) for request in requests for table in request.block_ids)
        references = sum(map(self.blocks.ref_count, range(self.blocks.num_blocks)))
        if held != references - num_others:
            raise RuntimeError(f"requests hold {held} blocks, counted {references - num_others}")
        if self.cache is not None:
            self.cache.check_integrity()
