import itertools

import pytest

from tinyvllm.config import SCHEDULING_POLICIES
from tinyvllm.engine.policy import AGEING, POLICIES, order_of, shortest
from tinyvllm.engine.request import Request
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError


def make_request(arrival, step, length=1, priority=0):
    request = Request(str(arrival), [1] * length, SamplingParams(), priority=priority)
    request.arrival, request.arrival_step = arrival, step
    return request


def test_each_option_has_its_order():
    assert tuple(POLICIES) == SCHEDULING_POLICIES


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", [0, 1, 2]), ("priority", [2, 0, 1]), ("shortest", [1, 2, 0])]
)
def test_orders(policy, order):
    requests = [
        make_request(0, 0, length=50, priority=3),
        make_request(1, 0, length=5, priority=3),
        make_request(2, 1, length=5, priority=-1),
    ]
    assert [r.arrival for r in sorted(requests, key=POLICIES[policy])] == order


def test_age_makes_up_for_length():
    long = make_request(0, 0, length=3 * AGEING)
    for step, overtakes in [(0, True), (2, True), (3, False), (4, False)]:
        assert (shortest(make_request(1, step, length=1)) < shortest(long)) == overtakes


def test_order_is_that_of_the_length_less_the_age_at_any_time():
    requests = [make_request(i, i % 7, length=1 + 37 * i % 200) for i in range(40)]
    for now in (7, 100):
        for a, b in itertools.combinations(requests, 2):
            ranks = [r.num_tokens - AGEING * (now - r.arrival_step) for r in (a, b)]
            assert (shortest(a) < shortest(b)) == (ranks[0] <= ranks[1])


def test_names_stand_for_orders_and_functions_elsewhere_are_imported():
    assert order_of("shortest") is shortest
    assert order_of("tinyvllm.engine.policy:shortest") is shortest


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("no_such_module:order", "No module named 'no_such_module'; is its folder on PYTHONPATH?"),
        ("tinyvllm.engine.policy:nothing", "tinyvllm.engine.policy has no function nothing"),
        ("tinyvllm.engine.policy:AGEING", "tinyvllm.engine.policy has no function AGEING"),
    ],
)
def test_what_cannot_be_imported_is_named(policy, message):
    with pytest.raises(InputError) as error:
        order_of(policy)
    assert str(error.value) == f"scheduling_policy={policy!r}: {message}"
