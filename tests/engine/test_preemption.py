import pytest
from toy import make_request

from tinyvllm.engine.block_tables import BlockTables
from tinyvllm.engine.preemption import (
    RECOMPUTE,
    REMEMBERED,
    SWAP,
    Preemption,
    RateMeter,
    cheaper,
)
from tinyvllm.engine.swapping import Swaps
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.memory.numpy_swapper import NumpySwapper
from tinyvllm.memory.swap_space import SwapSpace

# 10 blocks of 100 bytes each way at 1000 bytes/s take 2 s; 40 tokens at 10 a second 4 s.
CASE = {
    "blocks_out": 10,
    "blocks_in": 10,
    "block_bytes": 100,
    "free_host_blocks": 10,
    "out_rate": 1000.0,
    "in_rate": 1000.0,
    "tokens": 40,
    "prefill_rate": 10.0,
}


@pytest.mark.parametrize(
    ("mode", "changes", "wanted", "reason"),
    [
        ("auto", {}, SWAP, r"10 blocks out and 10 in take 2000.00 ms, 40 tokens again 4000.00 ms"),
        ("auto", {"prefill_rate": 25.0}, RECOMPUTE, "40 tokens again 1600.00 ms"),
        ("auto", {"blocks_out": 0, "prefill_rate": 25.0}, SWAP, "0 blocks out and 10 in"),
        ("auto", {"in_rate": 300.0}, RECOMPUTE, "take 4333.33 ms"),
        ("auto", {"out_rate": 300.0}, RECOMPUTE, "take 4333.33 ms"),
        ("auto", {"tokens": 10}, RECOMPUTE, "10 tokens again 1000.00 ms"),
        ("auto", {"prefill_rate": None}, SWAP, "nothing is measured yet"),
        ("auto", {"out_rate": None}, SWAP, "nothing is measured yet"),
        ("auto", {"in_rate": None}, SWAP, "nothing is measured yet"),
        ("auto", {"free_host_blocks": 9}, RECOMPUTE, "full: 10 blocks needed, 9 free"),
        ("swap", {"free_host_blocks": 9}, RECOMPUTE, "full: 10 blocks needed, 9 free"),
        ("swap", {"tokens": 1}, SWAP, "preemption_mode is swap"),
        ("recompute", {}, RECOMPUTE, "preemption_mode is recompute"),
    ],
)
def test_the_cheaper_one_is_chosen_and_the_reason_said(mode, changes, wanted, reason):
    have, why = cheaper(mode, **{**CASE, **changes})
    assert have == wanted
    assert reason in why


def test_a_rate_follows_the_last_seconds():
    meter = RateMeter()
    assert meter.rate is None
    meter.add(100, 1.0)
    assert meter.rate == 100
    for _ in range(50):
        meter.add(1000 * REMEMBERED, REMEMBERED)
    assert meter.rate == pytest.approx(1000, rel=1e-3)


def begin(tables, request, slot):
    """Gives a request blocks for its tokens, all but the last of which are computed."""
    plan, request.slot = tables.plan(request, None), slot
    tables.begin(request, plan, [])
    tables.grow(request, request.num_tokens - 1, [])
    request.num_computed_tokens = request.num_tokens - 1
    request.max_total_tokens = request.num_tokens + 5
    request.decoding = True
    tables.keep(request, request.num_computed_tokens)


@pytest.fixture
def tables():
    return BlockTables(BlockManager(40, 4, num_groups=2), prefix_caching=True)


@pytest.fixture
def victim(tables):
    """Of 14 tokens, 13 computed, in 4 blocks a group: 2 are another's too, 1 is copied already."""
    begin(tables, make_request("other", range(9)), 0)
    request = make_request("victim", range(14))
    begin(tables, request, 1)
    request.host_block_ids = [[0], [1]]
    return request


@pytest.fixture
def swaps(tables):
    """Of 100 bytes a block; 1000 bytes a second to the host and 500 back."""
    swapper = NumpySwapper(SwapSpace(50, 100))
    swapper.stats.plain_out_rate, swapper.stats.plain_in_rate = 1000.0, 500.0
    return Swaps(tables.blocks, swapper)


def prefill_rate(rate):
    meter = RateMeter()
    meter.add(rate, 1.0)
    return meter


@pytest.mark.parametrize(("rate", "wanted"), [(3.0, SWAP), (10.0, RECOMPUTE)])
def test_what_others_share_is_neither_copied_back_nor_computed_again(
    tables, swaps, victim, rate, wanted
):
    """Out go 4 - 1 blocks of two groups in 0.6 s, back come 4 - 2 in 0.8 s; 14 - 8 tokens."""
    choice, reason = Preemption(tables, swaps, "auto", prefill_rate(rate)).choose(victim, 4)
    assert reason == (f"6 blocks out and 4 in take 1400.00 ms, 6 tokens again {6000 / rate:.2f} ms")
    assert choice == wanted


def test_the_swap_space_must_hold_what_has_no_copy_yet(tables, swaps, victim):
    preemption = Preemption(tables, swaps, "swap", prefill_rate(1.0))
    swaps.swapper.space.allocate(50 - 6)
    assert preemption.choose(victim, 4) == (SWAP, "preemption_mode is swap")
    swaps.swapper.space.allocate(1)
    full = "swap space full: 6 blocks needed, 5 free"
    assert preemption.choose(victim, 4) == (RECOMPUTE, full)


@pytest.mark.parametrize(
    ("state", "params", "wanted", "reason"),
    [
        ({}, {}, SWAP, "preemption_mode is swap"),
        ({"decoding": False}, {}, RECOMPUTE, "its prompt is not computed"),
        ({}, {"presence_penalty": 0.5}, RECOMPUTE, "the counts of its tokens are on the device"),
        ({"max_total_tokens": 14}, {}, RECOMPUTE, "it ends with the token in flight"),
        ({"returning": True, "decoding": False}, {}, SWAP, "its blocks are still in the swap"),
    ],
)
def test_what_a_request_is_in_the_middle_of_decides_first(
    tables, swaps, state, params, wanted, reason
):
    request = make_request("victim", range(14), **params)
    begin(tables, request, 0)
    for name, value in state.items():
        setattr(request, name, value)
    have, why = Preemption(tables, swaps, "swap", prefill_rate(1.0)).choose(request, 4)
    assert have == wanted
    assert why.startswith(reason)


def test_without_a_swap_space_all_is_computed_again(tables, victim):
    preemption = Preemption(tables, Swaps(tables.blocks, None), "swap", prefill_rate(1.0))
    assert preemption.choose(victim, 4) == (RECOMPUTE, "there is no swap space")
