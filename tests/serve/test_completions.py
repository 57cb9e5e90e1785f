"""/v1/completions through the official client: every option, streamed and not."""

import openai
import pytest

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def both(client, **options):
    """The answer at once, and the joined stream: texts, finish reasons, logprobs, usage."""
    options = GREEDY | options
    extra = {**GREEDY["extra_body"], **options.pop("extra_body", {})}
    whole = client.completions.create(**options, extra_body=extra)
    stream = client.completions.create(
        **options, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    choices, usage = {}, None
    for chunk in stream:
        assert chunk.object == "text_completion"
        if not chunk.choices:
            usage = chunk.usage
        for choice in chunk.choices:
            known = choices.setdefault(choice.index, {"text": "", "logprobs": [], "finish": None})
            known["text"] += choice.text
            assert known["finish"] is None, "nothing comes after the end"
            known["finish"] = choice.finish_reason
            if choice.logprobs:
                known["logprobs"].append(choice.logprobs)
    return whole, choices, usage


def same(whole, choices, usage):
    assert [c.index for c in whole.choices] == sorted(choices)
    for choice in whole.choices:
        streamed = choices[choice.index]
        assert (choice.text, choice.finish_reason) == (streamed["text"], streamed["finish"])
        if choice.logprobs:
            parts = streamed["logprobs"]
            for name in ("tokens", "token_logprobs", "text_offset"):
                joined = [value for part in parts for value in getattr(part, name)]
                assert getattr(choice.logprobs, name) == pytest.approx(joined), name
    without_details = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert whole.usage.model_dump(include=without_details) == usage.model_dump(
        include=without_details
    )


def test_streamed_is_not_streamed(client):
    whole, choices, usage = both(client, prompt="ab")
    same(whole, choices, usage)
    assert whole.model == "tiny" and whole.id.startswith("cmpl-")
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 12)
    assert whole.choices[0].finish_reason == "length"


def test_prompts_may_be_texts_or_token_ids_one_or_several(client):
    one = client.completions.create(prompt="ab", **GREEDY).choices[0].text
    assert client.completions.create(prompt=[67, 68], **GREEDY).choices[0].text == one
    whole, choices, usage = both(client, prompt=["ab", "cd"], n=1)
    same(whole, choices, usage)
    assert whole.choices[0].text == one and usage.prompt_tokens == 4
    ids = client.completions.create(prompt=[[67, 68], [69, 70]], **GREEDY)
    assert [c.text for c in ids.choices] == [c.text for c in whole.choices]


def test_echo_puts_the_prompt_first(client):
    plain = client.completions.create(prompt="ab", **GREEDY).choices[0].text
    for prompt in ("ab", [67, 68]):
        whole, choices, usage = both(client, prompt=prompt, echo=True, logprobs=2)
        same(whole, choices, usage)
        (choice,) = whole.choices
        assert choice.text == "ab" + plain
        assert choice.logprobs.tokens[:2] == ["a", "b"]
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
        assert len(choice.logprobs.tokens) == 14


def test_echo_may_be_all(client):
    whole, choices, usage = both(client, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    same(whole, choices, usage)
    assert whole.choices[0].text == "abc" and usage.completion_tokens == 0
    assert whole.choices[0].logprobs.tokens == ["a", "b", "c"]


def test_logprobs_hold_the_chosen_token_and_the_likeliest(client):
    (choice,) = client.completions.create(prompt="ab", logprobs=3, **GREEDY).choices
    for token, logprob, top in zip(
        choice.logprobs.tokens,
        choice.logprobs.token_logprobs,
        choice.logprobs.top_logprobs,
        strict=True,
    ):
        assert top[token] == pytest.approx(logprob, abs=1e-3) and logprob <= 0
        assert 1 <= len(top) <= 4  # ids may share a text


def test_samples_differ_and_a_seed_repeats_them(client):
    options = {"prompt": "ab", "temperature": 2, "n": 3, "seed": 7, "max_tokens": 16}
    whole, choices, usage = both(client, **options)
    same(whole, choices, usage)
    assert len({c.text for c in whole.choices}) == 3
    assert usage.completion_tokens == 48 and usage.prompt_tokens == 2
    other = client.completions.create(**GREEDY | options | {"seed": 8})
    assert other.choices[0].text != whole.choices[0].text


def test_a_stop_string_across_tokens_ends_the_text(client):
    text = client.completions.create(prompt="ab", **GREEDY).choices[0].text
    # The texts of tokens like <x307> meet in "><".
    cut = text.index("><")
    stop = text[cut - 2 : cut + 4]
    whole, choices, usage = both(client, prompt="ab", stop=stop)
    same(whole, choices, usage)
    assert whole.choices[0].text == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == stop
    kept, choices, usage = both(
        client, prompt="ab", stop=[stop, "never"], extra_body={"include_stop_str_in_output": True}
    )
    same(kept, choices, usage)
    assert kept.choices[0].text == text[: text.index(stop) + len(stop)]


def test_characters_of_several_tokens_come_whole(client, server):
    """A mixture of the two bytes of an é: some are characters, and some never become one."""
    _, found = server.json("/tokenize", {"prompt": "é", "add_special_tokens": False})
    assert len(found["tokens"]) == 2
    bias = {str(token): 100 for token in found["tokens"]}
    whole, choices, usage = both(
        client, prompt="ab", temperature=1, seed=1, logit_bias=bias, max_tokens=200
    )
    same(whole, choices, usage)
    assert {"é", "\ufffd"} == set(whole.choices[0].text)


def test_penalties_and_filters_change_the_output(client):
    plain = client.completions.create(prompt="ab", **GREEDY | {"max_tokens": 40}).choices[0].text
    for option in (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 5.0, "ignore_eos": True}},
        {"logit_bias": {"70": 100}},
    ):
        other = client.completions.create(prompt="ab", **GREEDY | {"max_tokens": 40} | option)
        assert other.choices[0].text != plain, option
    # With one token to choose from, every temperature is greedy.
    for filters in ({"top_k": 1}, {"min_p": 1.0}):
        options = GREEDY | {"temperature": 1.5, "extra_body": {"ignore_eos": True} | filters}
        text = client.completions.create(prompt="ab", **options).choices[0].text
        assert text and plain.startswith(text), filters


@pytest.mark.parametrize(
    "extra",
    [
        {"min_tokens": 3},
        {"stop_token_ids": [5]},
        {"skip_special_tokens": False},
        {"bad_words": ["zz"]},
        {"priority": 3},
        {"prompt_logprobs": 1},
        {"add_special_tokens": False},
        {"best_of": 1},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "suffix": None},
        {"n": None, "stop": None, "logit_bias": None, "top_p": None, "stream": None},
    ],
)
def test_further_fields_are_accepted(client, extra):
    answer = client.completions.create(
        model="tiny", prompt="ab", max_tokens=4, temperature=0, extra_body=extra
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
    if "prompt_logprobs" in extra:
        assert answer.choices[0].prompt_logprobs[0] is None
        assert "68" in answer.choices[0].prompt_logprobs[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"n": 0}, "n: "),
        ({"best_of": 3}, "best_of=3"),
        ({"suffix": "x"}, "suffix: "),
        ({"prompt": ""}, "prompt='': is empty"),
        ({"prompt": [600]}, "prompt[0]=600"),
        ({"prompt": "a" * 3000}, "the prompt has 3000 tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias['a']"),
        ({"logit_bias": {"600": 1}}, "600"),
        ({"extra_body": {"guided_json": {}}}, "guided_json: this field is unknown"),
        ({"extra_body": {"temperature": "hot"}}, "temperature: Input should be a valid number"),
        ({"extra_body": {"stream_options": {"include_usage": True}}}, "only with stream=true"),
        ({"n": 2, "temperature": 0}, "n=2: must be 1 with temperature=0"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_options_are_400_and_named(client, options, message, stream):
    stream = stream and "stream_options" not in str(options)
    with pytest.raises(openai.BadRequestError) as error:
        list(
            client.completions.create(
                **{"model": "tiny", "prompt": "ab", "stream": stream} | options
            )
        )
    assert message in error.value.body["message"]
    assert error.value.body["type"] == "invalid_request_error"


def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError, match="tiny, org/tiny") as error:
        client.completions.create(model="huge", prompt="ab")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    assert client.completions.create(model="org/tiny", prompt="ab").model == "org/tiny"
