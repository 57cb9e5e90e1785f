import dataclasses
import math

import pytest

from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError


def test_defaults_are_vllms():
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "max_tokens": 16,
        "ignore_eos": False,
        "seed": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "stop_token_ids": (),
    }


def test_limits_themselves_are_accepted():
    low = SamplingParams(
        temperature=0, max_tokens=1, seed=0, logprobs=0, prompt_logprobs=0, stop_token_ids=[0]
    )
    assert low.greedy
    assert low.stop_token_ids == (0,)
    high = SamplingParams(max_tokens=None, seed=2**63 - 1, logprobs=20, prompt_logprobs=20)
    assert not high.greedy


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("temperature", math.nan, "0 to 1e"),
        ("temperature", math.inf, "0 to 1e"),
        ("temperature", -0.5, "0 to 1e"),
        ("temperature", 10**400, "0 to 1e"),
        ("temperature", True, "a number"),
        ("temperature", "1", "a number"),
        ("temperature", None, "a number"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -1, "at least 1"),
        ("max_tokens", 2.0, "an integer"),
        ("max_tokens", True, "an integer"),
        ("ignore_eos", 1, "True or False"),
        ("seed", -1, "0 to 9223372036854775807"),
        ("seed", 2**63, "0 to 9223372036854775807"),
        ("seed", 0.5, "an integer"),
        ("logprobs", -1, "0 to 20"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", False, "an integer"),
        ("prompt_logprobs", 21, "0 to 20"),
        ("prompt_logprobs", "5", "an integer"),
        ("stop_token_ids", 5, "list or tuple"),
        ("stop_token_ids", "12", "list or tuple"),
        ("stop_token_ids", None, "list or tuple"),
    ],
)
def test_bad_value_names_option_value_and_limit(option, value, limit):
    with pytest.raises(InputError) as error:
        SamplingParams(**{option: value})
    message = str(error.value)
    assert message.startswith(f"{option}={value}") or message.startswith(f"{option}={value!r}")
    assert limit in message


@pytest.mark.parametrize("bad", [-1, 1.0, "a", True])
def test_bad_stop_token_names_its_place(bad):
    with pytest.raises(InputError, match=r"stop_token_ids\[1\]"):
        SamplingParams(stop_token_ids=[3, bad])


def test_stop_tokens_are_copied():
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(3)
    assert params.stop_token_ids == (1, 2)


@pytest.mark.parametrize("option", ["top_p", "top_k", "n", "stop", "min_p", "tempreature"])
def test_unknown_option_is_an_error_that_names_it(option):
    with pytest.raises(TypeError, match=option):
        SamplingParams(**{option: 1})


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0
