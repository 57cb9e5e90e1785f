"""Who gives up blocks for whom, and when those come back who did."""

import pytest
from toy import (
    ToyDevice,
    check_step,
    expected_output,
    ids,
    make_request,
    make_scheduler,
    run_all,
    step_once,
)

from tinyvllm.driver.calls import CudaError


def test_latest_arrival_is_preempted_and_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=4, block_size=2, budget=16)
    device = ToyDevice(scheduler)
    first = make_request("first", [1, 2, 3], max_tokens=6)
    second = make_request("second", [4, 5, 6], max_tokens=6)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(2):  # three prompt tokens, then the fourth: both hold two full blocks
        step = scheduler.schedule()
        scheduler.update(step, device.run(step))
    kept = list(second.output_token_ids)
    step = scheduler.schedule()
    assert step.preempted == [second]
    assert [row.request for row in step.rows] == [first]
    assert second.output_token_ids == kept
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    assert list(scheduler.waiting) == [second]
    scheduler.add(make_request("third", [7], max_tokens=1))
    scheduler.update(step, device.run(step))
    finished = run_all(scheduler, device)
    assert [request.request_id for request in finished] == ["first", "third", "second"]
    assert second.output_token_ids == expected_output(second, scheduler)[0]


def test_least_urgent_is_preempted_whichever_came_first():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    device = ToyDevice(scheduler)
    low = make_request("low", [1, 2, 3], max_tokens=6, priority=1)
    high = make_request("high", [4, 5, 6], max_tokens=6)
    scheduler.add(low)
    scheduler.add(high)
    for _ in range(2):
        step_once(scheduler, device)
    step, _ = step_once(scheduler, device)
    assert step.preempted == [low]
    assert ids(run_all(scheduler, device)) == ["high", "low"]
    assert low.output_token_ids == expected_output(low, scheduler)[0]


def test_urgent_request_waits_for_a_place_but_takes_blocks_once_it_runs():
    scheduler = make_scheduler(
        num_blocks=8, block_size=2, seqs=3, budget=4, scheduling_policy="priority"
    )
    device = ToyDevice(scheduler)
    low = make_request("low", [1], max_tokens=12, priority=1)
    scheduler.add(low)
    step_once(scheduler, device)
    urgent = make_request("urgent", [4] * 13, max_tokens=2)
    scheduler.add(urgent)
    preempted = []
    while not urgent.finished:
        preempted += step_once(scheduler, device)[0].preempted
    assert preempted == [low]
    assert urgent.num_preemptions == 0
    run_all(scheduler, device)
    assert low.output_token_ids == expected_output(low, scheduler)[0]


def test_prompt_that_waits_for_blocks_takes_those_of_the_less_urgent():
    scheduler = make_scheduler(num_blocks=5, block_size=4, seqs=2, budget=4)
    device = ToyDevice(scheduler)
    low = make_request("low", [1] * 3, max_tokens=20, priority=1)
    urgent = make_request("urgent", [2] * 16, max_tokens=1)
    scheduler.add(low)
    step_once(scheduler, device)
    scheduler.add(urgent)
    for _ in range(4):  # 3 tokens of the prompt a step; the other takes the fifth block meanwhile
        assert not step_once(scheduler, device)[0].preempted
    assert (urgent.num_computed_tokens, scheduler.blocks.num_free) == (12, 0)
    step, _ = step_once(scheduler, device)
    assert step.preempted == [low]
    assert low.num_tokens <= 8, "it had room left in its own"
    assert ids(row.request for row in step.rows) == ["urgent"]
    run_all(scheduler, device)
    assert low.output_token_ids == expected_output(low, scheduler)[0]


def test_threshold_holds_back_admission_and_more_so_the_return():
    scheduler = make_scheduler(num_blocks=20, block_size=1, seqs=4, preemption_threshold=0.85)
    first = make_request("first", [1] * 9, max_tokens=None)
    scheduler.add(first)
    scheduler.add(make_request("more", [2] * 9))
    scheduler.add(make_request("fits", [3] * 2))
    step = scheduler.schedule()
    assert ids(scheduler.running) == ["first"], "9 + 9 blocks are above 17, and none overtakes"
    scheduler.abort("more")
    scheduler.update(step, [1])
    scheduler.schedule()
    assert ids(scheduler.running) == ["first", "fits"], "10 + 2 blocks are not"

    scheduler = make_scheduler(num_blocks=20, block_size=1, seqs=4, preemption_threshold=0.85)
    device = ToyDevice(scheduler)
    first = make_request("first", [1] * 8, max_tokens=6)
    second = make_request("second", [2] * 9, max_tokens=None)
    scheduler.add(first)
    scheduler.add(second)
    while not second.num_preemptions:
        step_once(scheduler, device)
    assert first.num_tokens + second.num_tokens > 16, "it may return at 16 blocks, not at 17"
    while not first.finished:
        assert scheduler.running == [first]
        step_once(scheduler, device)
    step_once(scheduler, device)
    assert scheduler.running == [second], "alone, it may go beyond the threshold"
    run_all(scheduler, device)
    assert second.num_known_tokens == 21
    assert second.num_preemptions == 1


def test_copies_of_what_is_no_longer_the_next_victim_make_room():
    """Copies of `old`, made while it was the last, fill the swap space when `new` needs some."""
    scheduler = make_scheduler(
        12, swap_blocks=5, polls=0, preemption_mode="swap", preemption_threshold=0.6
    )
    device = ToyDevice(scheduler)

    def step():
        scheduled = scheduler.schedule()
        check_step(scheduler, scheduled)
        scheduler.update(scheduled, device.run(scheduled))

    urgent = make_request("urgent", [2] * 16, priority=-1, max_tokens=10)
    old = make_request("old", [1] * 7, max_tokens=26)
    scheduler.add(urgent)
    scheduler.add(old)
    while not urgent.finished:
        step()
    assert old.num_host_blocks >= 2
    new = make_request("new", [3] * 5, priority=1, max_tokens=24)
    scheduler.add(new)
    run_all(scheduler, device)
    assert old.num_preemptions == 0 and new.num_preemptions == 1
    assert scheduler.num_preemptions == {"swap": 1, "recompute": 0}


@pytest.mark.parametrize("decoding", [True, False])
def test_copies_give_way_as_far_as_needed_but_the_victims_and_those_on_their_way_back(decoding):
    """A swap space of 16 blocks holds 2 copies a group of each of four requests."""
    scheduler = make_scheduler(40, num_groups=2, swap_blocks=16, polls=0, preemption_mode="swap")
    ToyDevice(scheduler)
    for name in ("urgent", "back", "old", "victim"):
        request = make_request(name, range(14), max_tokens=9)
        scheduler.add(request)
        scheduler.waiting.remove(request)
        scheduler.running.append(request)
        request.block_ids = [scheduler.blocks.allocate(4) for _ in range(2)]
        request.decoding, request.returning = name != "back", name == "back"
        scheduler.swaps.copy_out(request, 2)
    scheduler.end_copies()
    victim = scheduler.running[-1]
    victim.decoding = decoding

    def copies():
        return [request.num_host_blocks for request in scheduler.running]

    choice = scheduler._choose(victim, 4)
    if not decoding:
        assert (choice[0], copies()) == ("recompute", [2, 2, 2, 2]), "it needs no copies"
        return
    assert (choice[0], copies()) == ("swap", [0, 2, 2, 2]), "4 are free, and needed"
    choice = scheduler._choose(victim, 5)
    assert (choice[0], copies()) == ("swap", [0, 2, 0, 2]), "6 are needed, 8 free"
    choice = scheduler._choose(victim, 8)
    assert choice == ("recompute", "swap space full: 12 blocks needed, 8 free")
    assert copies() == [0, 2, 0, 2]


def test_nobody_else_is_preempted_for_blocks_that_a_copy_is_about_to_free():
    """Two blocks of `d` are being copied, one each for `a` and `b`; `c` finds none."""
    scheduler = make_scheduler(8, block_size=2, swap_blocks=8, preemption_mode="swap")
    device = ToyDevice(scheduler)
    requests = [make_request(name, [5, 6, 7], max_tokens=9) for name in "abcd"]
    for request in requests:
        scheduler.add(request)
    for _ in range(2):
        step_once(scheduler, device)
    assert scheduler.blocks.num_free == 0
    assert scheduler.schedule() is None, "all wait"
    assert ids(scheduler.running) == ["a", "b"]
    assert [request.num_preemptions for request in requests] == [0, 0, 1, 1]
    run_all(scheduler, device)
    for request in requests:
        assert request.output_token_ids == expected_output(request, scheduler)[0]


def test_a_request_whose_copy_fails_ends_and_the_event_says_why():
    scheduler = make_scheduler(4, block_size=2, swap_blocks=8, preemption_mode="swap")
    device = ToyDevice(scheduler)

    def broken(pairs):
        raise CudaError("cuMemcpyBatchAsync", 719, "CUDA_ERROR_LAUNCH_FAILED", "on purpose", ())

    scheduler.swaps.swapper.swap_out = broken
    first = make_request("first", [1, 2, 3], max_tokens=6)
    second = make_request("second", [4, 5, 6], max_tokens=6)
    scheduler.add(first)
    scheduler.add(second)
    assert ids(run_all(scheduler, device)) == ["second", "first"]
    assert (first.finish_reason, second.finish_reason) == ("length", "error")
    assert first.output_token_ids == expected_output(first, scheduler)[0]
    assert scheduler.num_preemptions == {"swap": 0, "recompute": 0}
    (event,) = [event for event in scheduler.events.events if event.request_id]
    assert (event.kind, event.request_id) == ("fail", "second")
    assert event.detail == second.stop_reason and "on purpose" in event.detail
