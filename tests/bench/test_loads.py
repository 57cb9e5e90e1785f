"""The loads are drawn as published, and ShareGPT's lengths have the means that they claim."""

import statistics

import pytest

from tinyvllm.bench.loads import LOADS, nano_vllm, sharegpt, uniform
from tinyvllm.util import InputError

VOCAB = 128256


def test_nano_vllms_load_is_drawn_in_the_order_of_its_script():
    load = nano_vllm(VOCAB, 0)
    assert (len(load.requests), load.num_output_tokens, load.temperature) == (256, 133966, 0.6)
    # From its script with Python's generator, seed 0: a length, then as many ids.
    assert len(load.requests[0].prompt) == 964
    assert load.requests[0].prompt[:3] == [6311, 6890, 663]
    assert max(max(request.prompt) for request in load.requests) == 10000
    assert all(100 <= request.output_len <= 1024 for request in load.requests)


def test_uniform_load_draws_lengths_in_lengths_out_then_ids():
    load = uniform(VOCAB, 0)
    assert (len(load.requests), load.num_output_tokens) == (512, 288243)
    assert load.num_input_tokens == 290801
    lengths = [len(request.prompt) for request in load.requests]
    assert (lengths[:3], load.requests[0].output_len) == ([784, 659, 729], 602)
    assert load.longest == max(len(r.prompt) + r.output_len for r in load.requests)


def test_sharegpt_has_the_papers_means_and_long_tails():
    load = sharegpt(VOCAB, 0, 10_000)
    inputs = [len(request.prompt) for request in load.requests]
    outputs = [request.output_len for request in load.requests]
    # Cut off at 1024, which takes a little of the means of 161 and 338.
    assert statistics.mean(inputs) == pytest.approx(155, rel=0.05)
    assert statistics.mean(outputs) == pytest.approx(300, rel=0.05)
    assert max(inputs) == max(outputs) == 1024
    assert statistics.median(inputs) < 0.7 * statistics.mean(inputs)
    with pytest.raises(InputError, match="requests=0"):
        sharegpt(VOCAB, 0, 0)


@pytest.mark.parametrize("name", LOADS)
def test_loads_are_the_same_for_a_seed_and_fit_any_vocabulary(name):
    load = LOADS[name](300, 1)
    assert load.name == name
    assert load == LOADS[name](300, 1) != LOADS[name](300, 2)
    assert all(0 <= token < 300 for r in load.requests for token in r.prompt)
    arrivals = [request.arrival for request in load.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
