"""A look at blocks and requests, against one made block by block."""

import random
from collections import Counter

import numpy as np
import pytest
from driving import make_scheduler

from tinyvllm.engine.request import Request, RequestStatus
from tinyvllm.engine.view import FIRST_LABEL, MAX_REQUESTS, SHARED, Viewer
from tinyvllm.memory.blocks import CACHED, FREE, IN_USE, BlockManager
from tinyvllm.memory.numpy_swapper import NumpySwapper
from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.sampling_params import SamplingParams

NUM_BLOCKS, VOCAB = 60, 50


def naive_cells(scheduler):
    """The value of each block, from reference counts and tables one by one."""
    blocks, holders = scheduler.blocks, {}
    for request in scheduler.running:
        for table in request.block_ids:
            for block in table:
                holders.setdefault(block, []).append(request)
    cells = []
    for block in range(blocks.num_blocks):
        held = holders.get(block, [])
        if blocks.ref_count(block) == 0:
            cells.append(CACHED if blocks.is_kept(block) else FREE)
        elif len(held) > 1:
            cells.append(SHARED)
        else:
            cells.append(FIRST_LABEL + held[0].arrival if held else IN_USE)
    return cells


def naive_host_cells(scheduler):
    if scheduler.swaps.swapper is None:
        return []
    space = scheduler.swaps.swapper.space
    cells = [IN_USE if users else FREE for users in space._users]
    for request in [*scheduler.running, *scheduler.waiting]:
        for table in request.host_block_ids:
            for block in table:
                cells[block] = FIRST_LABEL + request.arrival
    return cells


def numbers(cells):
    return np.frombuffer(cells, "<u2").tolist()


def swapping_scheduler(swap_blocks):
    swapper = None
    if swap_blocks:
        swapper = NumpySwapper(SwapSpace(swap_blocks, 8), polls=1)
        swapper.attach(np.zeros((NUM_BLOCKS, 1)))
    return make_scheduler(
        BlockManager(NUM_BLOCKS, 8),
        seqs=8,
        budget=64,
        max_len=400,
        vocab=VOCAB,
        swapper=swapper,
        preemption_mode="swap" if swapper else "recompute",
    )


def add_requests(scheduler, rng):
    """Some with several samples, and with prompts that begin alike."""
    prefix = [1] * 40
    for i in range(40):
        prompt = prefix[: rng.randrange(41)] + [rng.randrange(VOCAB) for _ in range(9)]
        params = SamplingParams(max_tokens=rng.randint(20, 150))
        parent = None
        for n in range(1 + i % 2):
            request = Request(f"{i}.{n}", prompt, params, parent=parent, index=n)
            parent = parent or request
            scheduler.add(request)


@pytest.mark.parametrize("looks", [0.9, 0.1])
@pytest.mark.parametrize("swap_blocks", [200, 0])
def test_cells_and_requests_of_a_hard_case(swap_blocks, looks):
    """Shared prefixes, samples, preemption, ends and new requests; a look after so many steps."""
    rng, seen, states = random.Random(5), Counter(), Counter()
    scheduler = swapping_scheduler(swap_blocks)
    viewer = Viewer(scheduler)
    add_requests(scheduler, rng)
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        if step is None:
            scheduler.wait_for_copy()
            continue
        scheduler.update(step, [rng.randrange(VOCAB) for _ in step.sampling_rows])
        if rng.random() > looks:
            continue
        view = viewer.look()
        assert numbers(view.cells) == naive_cells(scheduler)
        assert numbers(view.host_cells) == naive_host_cells(scheduler)
        seen.update(min(cell, FIRST_LABEL) for cell in numbers(view.cells))
        requests = [*scheduler.running, *scheduler.waiting]
        assert [r.request_id for r in view.requests] == [r.request_id for r in requests]
        for shown, request in zip(view.requests, requests, strict=True):
            states[shown.state] += 1
            assert shown.label == FIRST_LABEL + request.arrival
            assert shown.prompt_tokens == len(request.prompt_token_ids)
            assert shown.output_tokens == len(request.output_token_ids)
            assert shown.blocks == sum(map(len, request.block_ids))
            assert shown.host_blocks == sum(map(len, request.host_block_ids))
            assert shown.preemptions == request.num_preemptions
            assert (shown.state == "swapped") == (request.status is RequestStatus.SWAPPED)
    assert seen[FREE] and seen[CACHED] and seen[SHARED] and seen[FIRST_LABEL]
    if looks == 0.9:
        assert states.keys() >= {"decode", "prefill", "waiting"}
        assert states["swapped" if swap_blocks else "preempted"]
        assert not swap_blocks or (states["return"] and seen[IN_USE])
    kinds = {event.kind for event in viewer.look().events}
    assert kinds >= {"swap" if swap_blocks else "recompute", "return", "below"}


def test_of_many_requests_those_that_run_and_the_next_are_shown():
    scheduler = make_scheduler(BlockManager(100, 16), seqs=3, budget=64, max_len=100)
    for i in range(MAX_REQUESTS + 10):
        scheduler.add(Request(str(i), [1, 2, 3], SamplingParams(max_tokens=9)))
    scheduler.schedule()
    view = Viewer(scheduler).look()
    assert [r.state for r in view.requests[:4]] == ["decode"] * 3 + ["waiting"]
    assert len(view.requests) == MAX_REQUESTS and view.num_requests_left_out == 10
    assert view.host_cells == b""
