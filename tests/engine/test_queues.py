"""Requests that come, end, are stopped or refused: what they held is free, and counted right."""

import pytest
from toy import VOCAB, ToyDevice, make_request, make_scheduler, run_all, step_once

from tinyvllm.util import InputError


def test_abort_frees_at_once_wherever_the_request_is():
    scheduler = make_scheduler(num_blocks=10, seqs=1)
    running, waiting = make_request("a", [1] * 9), make_request("b", [2])
    scheduler.add(running)
    scheduler.add(waiting)
    step = scheduler.schedule()
    assert scheduler.abort("b") is waiting
    assert scheduler.abort("a") is running
    assert scheduler.blocks.num_free == 10
    assert not scheduler.has_unfinished()
    assert scheduler.update(step, [1]) == []
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert running.output_token_ids == []
    assert scheduler.abort("a") is None
    scheduler.check_integrity()
    scheduler.add(make_request("a", [1]))  # the id is free again


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"priority": 0.5}, "priority=0.5: must be an integer"),
        ([], {}, "the prompt is empty"),
        ([1] * 64, {}, r"64 tokens; it may have 63, .* max_model_len=64"),
        ([1] * 13, {}, "13 tokens needs 4 KV blocks of 4 tokens; the cache has 3"),
        ([1, VOCAB], {}, r"prompt\[1\]=50: token ids are from 0 to 49"),
        ([-1], {}, r"prompt\[0\]=-1"),
        ([1.0], {}, r"prompt\[0\]=1.0: a token id is an integer"),
        ([True], {}, r"prompt\[0\]=True"),
        ([1], {"stop_token_ids": [50]}, r"stop_token_ids\[0\]=50"),
    ],
)
def test_request_that_can_never_run_is_refused(prompt, options, message):
    scheduler = make_scheduler(num_blocks=3)
    with pytest.raises(InputError, match=f"request 'a': .*{message}"):
        scheduler.add(make_request("a", prompt, **options))
    assert not scheduler.has_unfinished()


def test_longest_prompt_is_accepted():
    scheduler = make_scheduler(num_blocks=16, max_len=64)
    request = make_request("a", [1] * 63, max_tokens=None)
    scheduler.add(request)
    run_all(scheduler, ToyDevice(scheduler))
    assert len(request.output_token_ids) == 1


def test_id_in_use_is_refused():
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add(make_request("a", [1]))
    with pytest.raises(InputError, match=r"'a'.* not finished"):
        scheduler.add(make_request("a", [2]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.blocks.allocate(1), "requests hold 1 blocks, counted 2"),
        (lambda s: s._free_slots.pop(), "slots .* are not each of 0..3 once"),
        (lambda s: s.waiting.pop(), r"queues hold arrivals \[0\], not all once"),
        (lambda s: s.blocks.keep(s.running[0].block_ids[0]), r"in the tree \[\], .* kept \[0\]"),
        (lambda s: s.running.append(s.waiting.pop()) or s.running.reverse(), "out of order"),
    ],
)
def test_integrity_check_finds_damage(damage, message):
    scheduler = make_scheduler(num_blocks=10)
    scheduler.add(make_request("a", [1]))
    scheduler.schedule()
    scheduler.add(make_request("b", [1]))
    scheduler.check_integrity()
    damage(scheduler)
    with pytest.raises(RuntimeError, match=message):
        scheduler.check_integrity()


def test_abort_in_flight_drops_tokens_and_blocks_once():
    scheduler = make_scheduler(num_blocks=10)
    device = ToyDevice(scheduler)
    request = make_request("a", range(9))
    scheduler.add(request)
    steps = [scheduler.schedule(), scheduler.schedule()]
    tokens = [device.run(step) for step in steps]
    scheduler.abort("a")
    again = make_request("a", range(9), max_tokens=1)
    scheduler.add(again)
    last = scheduler.schedule()
    last_tokens = device.run(last)
    for step, sampled in zip(steps, tokens, strict=True):
        assert scheduler.update(step, sampled) == []
        scheduler.check_integrity()
    assert scheduler.blocks.num_cached == 0, "blocks that were given back are not cached"
    assert scheduler.update(last, last_tokens) == [again]
    assert request.output_token_ids == []
    assert scheduler.blocks.num_cached == 2


def test_stop_string_ends_a_request_even_after_its_length():
    scheduler = make_scheduler(num_blocks=10)
    device = ToyDevice(scheduler)
    running, ended = make_request("a", [1], max_tokens=5), make_request("b", [1], max_tokens=1)
    scheduler.add(running)
    scheduler.add(ended)
    assert step_once(scheduler, device)[1] == [ended]
    for request in (running, ended):
        scheduler.stop(request, "end")
        assert (request.finish_reason, request.stop_reason) == ("stop", "end")
    assert not scheduler.has_unfinished()
    assert scheduler.blocks.num_used == 0
    scheduler.check_integrity()
