"""Sequences that begin alike share blocks, and no token of theirs is another for it."""

import random

import pytest
from toy import (
    ToyDevice,
    expected_output,
    ids,
    make_request,
    make_scheduler,
    random_stream,
    run_all,
    step_once,
)


def test_blocks_of_prompts_are_found_once_their_step_is_launched():
    """Before its tokens are there; what was sampled enters the cache when its values are known."""
    scheduler = make_scheduler(20, budget=16)
    device = ToyDevice(scheduler)
    scheduler.add(make_request("first", range(9), max_tokens=9))
    steps = [scheduler.schedule()]
    scheduler.add(make_request("second", range(9), max_tokens=1))
    tokens = [device.run(steps[0])]
    scheduler.launched(steps[0])
    for _ in range(4):  # the last begins the first block after one with sampled tokens
        steps.append(scheduler.schedule())
        tokens.append(device.run(steps[-1]))
        scheduler.launched(steps[-1])
    assert [(r.start, r.num_tokens) for r in steps[1].prefill_rows] == [(8, 1)], "two blocks found"
    first = steps[0].rows[0].request
    assert (steps[-1].rows[0].start, first.num_kept_blocks) == (12, 2)
    for step, sampled in zip(steps, tokens, strict=True):
        scheduler.update(step, sampled)
        scheduler.check_integrity()
    assert first.num_kept_blocks == 3


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("length", "start"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_equal_prompt_computes_at_least_one_token(length, start, lag):
    scheduler = make_scheduler(num_blocks=20)
    device = ToyDevice(scheduler)
    prompt = list(range(length))
    for name in "abc":
        request = make_request(name, prompt, max_tokens=3)
        scheduler.add(request)
        run_all(scheduler, device, lag)
        assert request.output_token_ids == expected_output(request, scheduler)[0]
        assert request.num_cached_tokens == (0 if name == "a" else start)
    cache = scheduler.tables.cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (3 * length, 2 * start)


def test_outputs_enter_the_cache_but_no_token_of_a_discarded_row():
    scheduler = make_scheduler(num_blocks=20, block_size=2)
    output = expected_output(make_request("", [1, 2], max_tokens=4), scheduler)[0]
    request = make_request("a", [1, 2], eos=[output[3]])
    assert output[3] not in output[:3]
    scheduler.add(request)
    device = ToyDevice(scheduler)
    run_all(scheduler, device, lag=2)
    assert request.output_token_ids == output
    # Six tokens are known; the last was an input only of rows that were discarded.
    path = scheduler.tables.cache.lookup([1, 2, *output, 0, 0])
    assert [entry.tokens for entry in path] == [(1, 2), tuple(output[:2])]


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}, {"presence_penalty": 0.5}])
def test_requests_that_look_at_each_token_compute_all(options):
    scheduler = make_scheduler(num_blocks=20)
    device = ToyDevice(scheduler)
    first = make_request("a", range(9), max_tokens=2, **options)
    scheduler.add(first)
    scheduler.add(make_request("b", range(9), parent=first, max_tokens=2, **options))
    run_all(scheduler, device)
    assert device.num_computed == 2 * 10
    plain = make_request("c", range(9), max_tokens=2)
    scheduler.add(plain)
    run_all(scheduler, device)
    assert plain.num_cached_tokens == 8, "what they computed is of use to others"


@pytest.mark.parametrize(
    ("length", "num_copies", "num_blocks"), [(1, 0, 3), (7, 2, 4), (8, 2, 4), (9, 0, 5), (10, 2, 5)]
)
def test_samples_share_the_blocks_of_their_prompt(length, num_copies, num_blocks):
    scheduler = make_scheduler(num_blocks=20, enable_prefix_caching=False)
    device = ToyDevice(scheduler)
    parent = make_request("p", range(length), max_tokens=6)
    children = [make_request(f"p.{i}", range(length), parent=parent, max_tokens=6) for i in (1, 2)]
    other = make_request("other", [1], max_tokens=6)
    for request in (parent, *children, other):
        scheduler.add(request)
    step, _ = step_once(scheduler, device)
    assert ids(row.request for row in step.rows) == ["p", "other"], "samples are passed over"
    scheduler.abort("other")
    step, _ = step_once(scheduler, device)
    assert len(step.block_copies) == num_copies
    assert [(row.start, row.num_tokens) for row in step.joins] == [(length - 1, 1)] * 2
    grown = length % 4 == 0  # the parent's next token begins a block
    assert scheduler.blocks.num_used == num_blocks + grown
    scheduler.abort("p")
    run_all(scheduler, device)
    for request in children:
        assert request.output_token_ids == expected_output(request, scheduler)[0]
    assert scheduler.blocks.num_used == 0


def test_sample_without_its_parent_is_a_request_like_others():
    scheduler = make_scheduler(num_blocks=20, seqs=1)
    device = ToyDevice(scheduler)
    parent = make_request("p", range(9), max_tokens=2)
    child = make_request("p.1", range(9), parent=parent, max_tokens=2)
    scheduler.add(parent)
    scheduler.add(child)
    assert run_all(scheduler, device) == [parent, child]
    assert child.output_token_ids == parent.output_token_ids
    assert child.num_cached_tokens == 8, "found in the prefix cache"


def test_tokens_with_equal_hashes_share_nothing():
    modulus = (1 << 61) - 1  # of the hash of an int
    scheduler = make_scheduler(num_blocks=20, block_size=2, vocab=1 << 62)
    device = ToyDevice(scheduler)
    prompts = [[1, 2, 3, 4], [1 + modulus, 2, 3, 4], [1, 2, 3 + modulus, 4]]
    for i, prompt in enumerate(prompts):
        assert hash(tuple(prompt)) == hash(tuple(prompts[0]))
        request = make_request(str(i), [*prompt, 5], max_tokens=3)
        scheduler.add(request)
        run_all(scheduler, device)
        assert request.output_token_ids == expected_output(request, scheduler)[0]
        assert request.num_cached_tokens == (2 if i == 2 else 0)


def test_caching_changes_no_token_and_saves_work():
    computed, outputs = [], []
    for caching in (False, True):
        rng = random.Random(5)
        scheduler = make_scheduler(num_blocks=30, enable_prefix_caching=caching)
        device = ToyDevice(scheduler)
        requests = [request for group in random_stream(rng, scheduler, 40) for request in group]
        for request in requests:
            scheduler.add(request)
        run_all(scheduler, device, lag=1)
        computed.append(device.num_computed)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    assert computed[1] < 0.9 * computed[0]


def test_update_and_schedule_touch_the_cache_only_when_a_block_fills():
    scheduler = make_scheduler(num_blocks=20, block_size=8)
    scheduler.add(make_request("a", [1], max_tokens=20))
    device = ToyDevice(scheduler)
    filled = [len(step_once(scheduler, device)[0].filled) for _ in range(18)]
    assert [i for i, n in enumerate(filled) if n] == [0, 8, 16]
