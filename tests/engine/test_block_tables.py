import pytest

from tinyvllm.engine.block_tables import BlockTables
from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.sampling_params import SamplingParams


def begin(tables, slot, num_tokens, parent=None):
    """A request whose whole prompt is in its blocks, the plan, and what the device is told."""
    request = Request(str(slot), list(range(num_tokens)), SamplingParams())
    plan = tables.plan(request, parent)
    request.slot = slot
    entries = []
    used = tables.blocks.num_used
    copies = tables.begin(request, plan, entries)
    tables.grow(request, num_tokens, entries)
    request.num_computed_tokens = num_tokens
    assert tables.blocks.num_used == used + plan.num_blocks
    assert entries == [
        (group, slot, i, request.block_ids[group][i]) for group, _, i, _ in entries
    ], "all entries, where they are"
    assert len(set(entries)) == len(entries) == sum(map(len, request.block_ids))
    return request, plan, copies


def test_a_fork_shares_full_blocks_and_copies_the_last():
    tables = BlockTables(BlockManager(20, 4, num_groups=2), prefix_caching=False)
    parent, plan, copies = begin(tables, 0, 7)
    assert (plan.start, plan.num_blocks, copies) == (0, 4, [])
    child, plan, copies = begin(tables, 1, 7, parent)
    assert (plan.start, plan.num_blocks) == (6, 2)
    assert [table[0] for table in child.block_ids] == [table[0] for table in parent.block_ids]
    assert copies == [
        (theirs[1], own[1]) for theirs, own in zip(parent.block_ids, child.block_ids, strict=True)
    ]
    tables.check_integrity([parent, child])
    tables.release(parent)
    assert tables.blocks.num_used == 4
    tables.release(child)
    assert tables.blocks.num_used == 0


@pytest.mark.parametrize(("num_kept", "start", "num_blocks"), [(3, 0, 3), (4, 4, 2), (11, 8, 1)])
def test_a_plan_counts_blocks_that_come_into_use(num_kept, start, num_blocks):
    """Nine tokens, of which another request has computed the first, and runs."""
    tables = BlockTables(BlockManager(20, 4), prefix_caching=True)
    other, _, _ = begin(tables, 0, 11)
    tables.keep(other, num_kept)
    request, plan, _ = begin(tables, 1, 9)
    assert (plan.start, plan.num_blocks) == (start, num_blocks)
    tables.release(request)
    tables.release(other)
    # Now the other has ended: the same blocks are shared, but come into use again.
    request, plan, _ = begin(tables, 1, 9)
    assert (plan.start, plan.num_blocks) == (start, 3)
    assert request.num_cached_tokens == start
    tables.check_integrity([request])


def test_who_must_see_each_token_shares_none_but_on_the_return_from_the_swap_space():
    tables = BlockTables(BlockManager(20, 4), prefix_caching=True)
    other, _, _ = begin(tables, 0, 8)
    tables.keep(other, 8)
    request = Request("a", list(range(9)), SamplingParams(prompt_logprobs=1))
    assert tables.plan(request, None).start == 0
    request.status = RequestStatus.SWAPPED
    assert tables.plan(request, None).start == 8


def test_what_follows_an_evicted_twin_is_not_kept():
    tables = BlockTables(BlockManager(4, 4), prefix_caching=True)
    first, _, _ = begin(tables, 0, 4)
    twin, _, _ = begin(tables, 1, 8)  # before the first one's block is known
    tables.keep(first, 4)
    tables.keep(twin, 4)
    assert tables.blocks.is_kept(first.block_ids[0][0])
    assert not tables.blocks.is_kept(twin.block_ids[0][0])
    tables.release(first)
    taken = tables.blocks.allocate(2)  # all that is left, the cached block too
    tables.keep(twin, 8)
    assert not any(map(tables.blocks.is_kept, twin.block_ids[0]))
    tables.blocks.free(taken)
    tables.release(twin)
    tables.check_integrity([])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    tables = BlockTables(BlockManager(4, 4), prefix_caching=True)
    request, _, _ = begin(tables, 0, 16)
    tables.keep(request, 16)
    tables.release(request)
    tables.blocks.allocate(1)
    assert len(tables.cache.lookup(range(16))) == 3


def test_blocks_that_nobody_holds_are_found():
    tables = BlockTables(BlockManager(4, 4), prefix_caching=True)
    begin(tables, 0, 4)
    with pytest.raises(RuntimeError, match="requests hold 0 blocks, counted 1"):
        tables.check_integrity([])


def test_shared_blocks_are_those_kept_with_other_users_than_copies():
    tables = BlockTables(BlockManager(40, 4, num_groups=2), prefix_caching=True)
    first, _, _ = begin(tables, 0, 15)
    tables.keep(first, 12)
    assert tables.num_shared(first, {}) == 0, "nobody else uses them"
    begin(tables, 1, 12)  # finds two blocks a group: one token is left to compute
    assert tables.num_shared(first, {}) == 2
    begin(tables, 2, 5)
    copied = first.block_ids[1][1]  # in one group only, by one of its two users
    assert tables.num_shared(first, {copied: 1}) == 1
    assert tables.num_shared(first, {first.block_ids[0][0]: 1}) == 2, "three users, one a copy"
    assert tables.num_shared(first, {first.block_ids[0][0]: 2}) == 0, "what follows counts no more"


def test_a_forks_blocks_are_shared_for_good_only_once_they_are_kept():
    for prefix_caching, num_shared in ((True, 1), (False, 0)):
        tables = BlockTables(BlockManager(20, 4), prefix_caching)
        parent, _, _ = begin(tables, 0, 9)
        begin(tables, 1, 9, parent)
        assert tables.num_shared(parent, {}) == 0
        tables.keep(parent, 4)
        assert tables.num_shared(parent, {}) == num_shared
