import dataclasses
import math
import pickle

import pytest

from tinyvllm.sampling_params import MAX_LOGIT_BIAS, SamplingParams, bad_word_ids
from tinyvllm.util import InputError


def test_defaults_are_vllms():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "bad_words": (),
        "max_tokens": 16,
        "min_tokens": 0,
        "ignore_eos": False,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "detokenize": True,
        "logprobs": None,
        "prompt_logprobs": None,
    }


def test_limits_themselves_are_accepted():
    low = SamplingParams(
        temperature=0,
        top_p=1e-9,
        top_k=-1,
        min_p=0,
        repetition_penalty=0.001,
        presence_penalty=-2,
        frequency_penalty=-2,
        logit_bias={0: -100},
        max_tokens=1,
        min_tokens=1,
        seed=0,
        logprobs=0,
        prompt_logprobs=0,
        stop_token_ids=[0],
    )
    assert low.greedy
    assert low.stop_token_ids == (0,)
    high = SamplingParams(
        n=10_000,
        top_k=2**31 - 1,
        min_p=1,
        repetition_penalty=1000,
        presence_penalty=2,
        frequency_penalty=2,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 100.0),
        max_tokens=None,
        min_tokens=10**6,
        seed=2**63 - 1,
        logprobs=20,
        prompt_logprobs=20,
    )
    assert not high.greedy


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("temperature", math.nan, "0 to 1000000"),
        ("temperature", math.inf, "0 to 1000000"),
        ("temperature", -0.5, "0 to 1000000"),
        ("temperature", 10**400, "0 to 1000000"),
        ("temperature", True, "a number"),
        ("temperature", "1", "a number"),
        ("temperature", None, "a number"),
        ("n", 0, "at least 1"),
        ("n", 1.0, "an integer"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.5, "0 to 1"),
        ("top_p", math.nan, "0 to 1"),
        ("top_k", -2, "-1 to 2147483647"),
        ("top_k", 2**31, "-1 to 2147483647"),
        ("top_k", 5.0, "an integer"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", 1.1, "0 to 1"),
        ("repetition_penalty", 0, "0.001 to 1000"),
        ("repetition_penalty", math.inf, "0.001 to 1000"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("frequency_penalty", -2.1, "-2 to 2"),
        ("frequency_penalty", "1", "a number"),
        ("logit_bias", [1, 2], "map token ids"),
        ("bad_words", "word", "list or tuple"),
        ("stop", 5, "list or tuple"),
        ("min_tokens", -1, "from 0 to 16"),
        ("min_tokens", 17, "from 0 to 16"),
        ("skip_special_tokens", 1, "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
        ("detokenize", "no", "True or False"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2, "temperature": 0}, "n=2: must be 1 with temperature=0"),
        ({"logit_bias": {-1: 1.0}}, "token id=-1: must be at least 0"),
        ({"logit_bias": {"7": 1.0}}, "token id='7': must be an integer"),
        ({"logit_bias": {7: 101}}, r"logit_bias\[7\]=101: must be from -100 to 100"),
        ({"logit_bias": {7: math.nan}}, r"logit_bias\[7\]=nan: must be from -100 to 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "1025 entries: at most 1024"),
        ({"bad_words": ["a", ""]}, r"bad_words\[1\]='': must not be empty"),
        ({"bad_words": ["a", 3]}, r"bad_words\[1\]=3: must be a text"),
        ({"stop": [""]}, r"stop\[0\]='': must not be empty"),
        ({"stop": "", "n": 1}, r"stop\[0\]='': must not be empty"),
        ({"stop": "x", "detokenize": False}, "needs detokenize=True"),
    ],
)
def test_bad_entries_and_combinations(options, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)


def test_a_single_stop_text_is_one():
    assert SamplingParams(stop="abc").stop == ("abc",)
    assert SamplingParams(stop=["a", "b c"]).stop == ("a", "b c")
    assert SamplingParams(stop=None).stop == ()


@pytest.mark.parametrize(
    ("options", "sampler", "counted"),
    [
        ({}, "plain", False),
        ({"top_k": -1, "top_p": 1}, "plain", False),
        ({"top_k": 5, "temperature": 0}, "plain", False),
        ({"top_k": 5}, "filter", False),
        ({"top_p": 0.5}, "filter", False),
        ({"min_p": 0.5}, "filter", False),
        ({"logit_bias": {}}, "plain", False),
        ({"prompt_logprobs": 3}, "plain", False),
        ({"logprobs": 0, "temperature": 0}, "filter", False),
        ({"logit_bias": {3: 1}, "temperature": 0}, "adjust", False),
        ({"min_tokens": 1, "top_k": 5}, "adjust", False),
        ({"bad_words": ["a"]}, "adjust", True),
        ({"repetition_penalty": 1.1}, "adjust", True),
        ({"presence_penalty": -1}, "adjust", True),
        ({"frequency_penalty": 0.1, "temperature": 0}, "adjust", True),
    ],
)
def test_the_sampler_is_the_least_that_can(options, sampler, counted):
    params = SamplingParams(**options)
    assert (params.sampler, params.counted) == (sampler, counted)


WORDS = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [5, 6], "x": [7], " x": [8, 9]}
WORDS |= {"same": [7], " same": [7], "long": list(range(8)), " long": [1]}


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ([], []),
        (["cat"], [(1,), (2,)]),
        ([" cat"], [(1,), (2,)]),
        (["dog", "x"], [(3, 4), (5, 6), (7,)]),  # the space is a token before x
        (["same"], [(7,)]),
    ],
)
def test_bad_words_as_they_are_at_the_start_and_after_a_space(words, ids):
    assert bad_word_ids(words, WORDS.__getitem__) == ids


def test_bad_words_of_too_many_or_no_tokens():
    assert bad_word_ids(["word"], lambda text: range(7)) == [tuple(range(7))]
    with pytest.raises(InputError, match=r"bad_words\[0\]=' ' has 0 tokens: must have from 1 to 7"):
        bad_word_ids([" "], lambda text: [])
    with pytest.raises(InputError, match=r"bad_words\[1\]='long' has 8 tokens: .* 1 to 7"):
        bad_word_ids(["cat", "long"], WORDS.__getitem__)


def test_params_travel_between_processes():
    params = SamplingParams(logit_bias={1: 2.0}, stop="a", bad_words=["b"])
    assert pickle.loads(pickle.dumps(params)) == params


def test_stop_tokens_are_copied():
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(3)
    assert params.stop_token_ids == (1, 2)


@pytest.mark.parametrize("option", ["top_q", "best_of", "tempreature"])
def test_unknown_option_is_an_error_that_names_it(option):
    with pytest.raises(TypeError, match=option):
        SamplingParams(**{option: 1})


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0
