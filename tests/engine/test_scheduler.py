"""Which tokens of which requests a step computes, and that the outputs are those of one alone."""

import random
from collections import deque

import pytest
from toy import (
    ToyDevice,
    expected_output,
    ids,
    make_request,
    make_scheduler,
    next_token,
    random_stream,
    run_all,
    step_once,
)

from tinyvllm.engine.policy import AGEING


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_random_streams_match_naive_model(seed, lag):
    """Some 40,000 steps in all: without swap space, with little, and with much."""
    rng, swap_blocks = random.Random(seed), (0, 4, 1000)[seed % 3]
    seqs = rng.choice([1, 2, 3, 5])
    scheduler = make_scheduler(
        num_blocks=rng.choice([3, 5, 7, 12, 25]),
        block_size=rng.choice([1, 3, 4]),
        num_groups=rng.choice([1, 1, 2]),
        seqs=seqs,
        budget=seqs + rng.choice([0, 1, 6, 40]),
        max_len=rng.choice([8, 40]),
        scheduling_policy=rng.choice(["fcfs", "priority", "shortest"]),
        preemption_threshold=rng.choice([0.5, 0.85, 1.0]),
        enable_prefix_caching=rng.random() < 0.8,
        swap_blocks=swap_blocks,
        polls=rng.choice([0, 1, 5]),
        preemption_mode=rng.choice(["auto", "swap"]),
        long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
    )
    stream = deque(random_stream(rng, scheduler, 18))
    requests, aborted = [], set()

    def arrive():
        for request in stream.popleft():
            requests.append(request)
            scheduler.add(request)

    def arrive_and_abort():
        while stream and rng.random() < 0.4:
            arrive()
        if requests and rng.random() < 0.03:
            victim = scheduler.abort(rng.choice(requests).request_id)
            if victim is not None:
                aborted.add(victim)
        if not scheduler.has_unfinished() and stream:
            arrive()

    device = ToyDevice(scheduler)
    finished = run_all(scheduler, device, lag, arrive_and_abort)

    assert not stream
    assert len(finished) == len(set(finished)) == len(requests) - len(aborted)
    assert set(finished) | aborted == set(requests)
    scheduler.end_copies()
    scheduler.check_integrity()
    assert scheduler.blocks.num_used == 0
    assert not swap_blocks or scheduler.swaps.swapper.space.num_used == 0
    assert not scheduler.running
    assert not scheduler.waiting
    for request in requests:
        output, reason, stop_reason = expected_output(request, scheduler)
        assert request.finished
        if request in aborted:
            assert request.finish_reason == "abort"
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == output
            assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


def test_first_come_first_served():
    scheduler = make_scheduler(num_blocks=100, seqs=2)
    requests = [make_request(f"r{i}", [i], max_tokens=3) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    assert run_all(scheduler, ToyDevice(scheduler)) == requests


def test_decode_rows_come_first_and_prompts_share_the_rest():
    scheduler = make_scheduler(num_blocks=100, budget=10)
    device = ToyDevice(scheduler)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=9))
    scheduler.add(make_request("b", [4] * 12, max_tokens=9))
    scheduler.add(make_request("c", [5] * 2, max_tokens=9))

    def shape(step):
        return [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in step.rows]

    steps = []
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.update(step, device.run(step))
        steps.append(step)
    assert shape(steps[0]) == [("a", 0, 3, True), ("b", 0, 7, False)]
    assert shape(steps[1]) == [("a", 3, 1, True), ("b", 7, 5, True), ("c", 0, 2, True)]
    assert shape(steps[2]) == [("a", 4, 1, True), ("b", 12, 1, True), ("c", 2, 1, True)]
    assert [step.num_decodes for step in steps] == [0, 1, 3]
    assert [row.request.request_id for row in steps[1].joins] == ["c"]
    assert [len(step.sampling_rows) for step in steps] == [1, 3, 3]


def test_long_prompt_is_cut_smaller_while_others_decode():
    scheduler = make_scheduler(100, seqs=5, budget=16, long_prefill_token_threshold=3)
    scheduler.add(make_request("first", range(1, 21)))
    assert [r.num_tokens for r in scheduler.schedule().rows] == [16], "nobody decodes"
    for name, length in (("long", 8), ("short", 2)):
        scheduler.add(make_request(name, range(1, length + 1)))
    # The end of the first prompt, and what the budget leaves to others: nobody decodes yet.
    assert [r.num_tokens for r in scheduler.schedule().rows] == [4, 8, 2]
    scheduler.add(make_request("late", range(20, 27)))
    scheduler.add(make_request("last", range(1)))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [[r.num_tokens for r in step.prefill_rows] for step in steps] == [[3], [3], [1, 1]]
    assert [step.num_decodes for step in steps] == [3, 3, 3]


def test_ahead_of_the_tokens_no_row_is_launched_past_its_length():
    scheduler = make_scheduler(num_blocks=10)
    request = make_request("a", [1, 2], max_tokens=2)
    scheduler.add(request)
    device = ToyDevice(scheduler)
    steps = [scheduler.schedule(), scheduler.schedule()]
    tokens = [device.run(step) for step in steps]
    assert scheduler.schedule() is None
    assert scheduler.has_unfinished()
    assert scheduler.update(steps[0], tokens[0]) == []
    assert scheduler.update(steps[1], tokens[1]) == [request]


def test_token_launched_after_the_end_is_dropped():
    end = next_token([1, 2])
    scheduler = make_scheduler(num_blocks=10)
    request = make_request("a", [1, 2], eos=[end])
    scheduler.add(request)
    device = ToyDevice(scheduler)
    steps = [scheduler.schedule(), scheduler.schedule()]
    tokens = [device.run(step) for step in steps]
    assert scheduler.update(steps[0], tokens[0]) == [request]
    assert scheduler.update(steps[1], tokens[1]) == []
    assert request.output_token_ids == [end]


END = next_token([1, 2])


@pytest.mark.parametrize(
    ("eos", "options", "ends"),
    [
        ([END], {}, (1, "stop", None)),
        ([END + 1, END], {}, (1, "stop", None)),
        ([END], {"max_tokens": 1}, (1, "stop", None)),
        ([END], {"ignore_eos": True, "max_tokens": 2}, (2, "length", None)),
        ([], {"stop_token_ids": [END]}, (1, "stop", END)),
        ([END], {"stop_token_ids": [END], "ignore_eos": True}, (1, "stop", END)),
        ([], {"max_tokens": 3}, (3, "length", None)),
        ([], {"max_tokens": None}, (10, "length", None)),  # max_model_len 12
    ],
)
def test_ends(eos, options, ends):
    scheduler = make_scheduler(num_blocks=10, max_len=12)
    request = make_request("a", [1, 2], eos=eos, **options)
    scheduler.add(request)
    assert run_all(scheduler, ToyDevice(scheduler)) == [request]
    assert (len(request.output_token_ids), request.finish_reason, request.stop_reason) == ends


def test_sequence_that_outgrows_the_whole_cache_ends_by_length():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    request = make_request("a", [1] * 12, max_tokens=None)
    other = make_request("b", [1] * 5, max_tokens=None)
    scheduler.add(request)
    scheduler.add(other)
    assert run_all(scheduler, ToyDevice(scheduler)) == [request, other]
    # 12 tokens fit; the 13th is sampled from them and need not be stored.
    assert [request.num_known_tokens, other.num_known_tokens] == [13, 13]
    assert request.finish_reason == other.finish_reason == "length"


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", "abcd"), ("priority", "cabd"), ("shortest", "cdba")],
)
def test_order_of_admission(policy, order):
    scheduler = make_scheduler(num_blocks=40, seqs=1, scheduling_policy=policy)
    for name, length, priority in [("a", 9, 0), ("b", 5, 1), ("c", 2, -1), ("d", 2, 1)]:
        scheduler.add(make_request(name, [1] * length, priority=priority, max_tokens=2))
    assert "".join(ids(run_all(scheduler, ToyDevice(scheduler)))) == order


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
def test_nobody_starves_in_a_stream_that_never_ends(policy):
    """One slot, and a short prompt comes each step: the queue only grows."""
    scheduler = make_scheduler(num_blocks=40, seqs=1, scheduling_policy=policy)
    device = ToyDevice(scheduler)
    for i in range(5):
        scheduler.add(make_request(f"before{i}", [i], max_tokens=1))
    long = make_request("long", [1] * 60, max_tokens=1)
    scheduler.add(long)
    for i in range(20):
        scheduler.add(make_request(f"short{i}", [i], max_tokens=1))
        step_once(scheduler, device)
    # At the most: five before it, those of the next 60 / AGEING steps, and four chunks of its own.
    assert 5 + 60 / AGEING + 4 < 20
    assert long.finished
    assert scheduler.waiting
