"""/v1/chat/completions through the official client."""

import openai
import pytest

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {
    "model": "tiny",
    "messages": HELLO,
    "temperature": 0,
    "max_completion_tokens": 12,
    "extra_body": {"ignore_eos": True},
}


def joined(client, **options):
    """A stream's text by choice, finish reasons, logprobs; and its usage."""
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    choices, usage = {}, None
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.index not in choices:
                assert choice.delta.role == "assistant"
                choices[choice.index] = {"text": "", "logprobs": [], "finish": None}
            known = choices[choice.index]
            known["text"] += choice.delta.content or ""
            known["finish"] = choice.finish_reason
            known["logprobs"] += choice.logprobs.content if choice.logprobs else []
    return choices, usage


def test_streamed_is_not_streamed(client):
    options = GREEDY | {"n": 2, "temperature": 1.5, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options)
    choices, usage = joined(client, **options)
    assert len({c.message.content for c in whole.choices}) == 2
    assert whole.id.startswith("chatcmpl-") and whole.usage.completion_tokens == 24
    assert usage.total_tokens == whole.usage.total_tokens
    for choice in whole.choices:
        assert choice.message.role == "assistant"
        streamed = choices[choice.index]
        assert (choice.message.content, choice.finish_reason) == (
            streamed["text"],
            streamed["finish"],
        )
        assert len(choice.logprobs.content) == 12
        for one, other in zip(choice.logprobs.content, streamed["logprobs"], strict=True):
            assert (one.token, one.bytes) == (other.token, other.bytes)
            assert one.logprob == pytest.approx(other.logprob)
            assert len(one.top_logprobs) == 2 and bytes(one.bytes).decode() == one.token


def test_the_template_makes_the_prompt(client, server):
    """The chat is the completion of the rendered text."""
    text = "<system>be brief\n<user>hello\nyou\n<assistant>"
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("hello", "you")]},
    ]
    _, found = server.json("/tokenize", {"messages": messages})
    _, expected = server.json("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert found["tokens"] == expected["tokens"]
    chat = client.chat.completions.create(**GREEDY | {"messages": messages})
    completion = client.completions.create(
        model="tiny",
        prompt=expected["tokens"],
        temperature=0,
        max_tokens=12,
        extra_body={"ignore_eos": True},
    )
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.usage.prompt_tokens == len(expected["tokens"])


def test_template_variables_may_be_given(server):
    body = {"messages": HELLO, "chat_template_kwargs": {"suffix": "!"}}
    _, found = server.json("/tokenize", body)
    _, without = server.json("/tokenize", {"messages": HELLO})
    assert found["count"] == without["count"] + 1
    status, error = server.json("/tokenize", body | {"chat_template_kwargs": {"messages": []}})
    assert status == 400 and "messages" in error["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": "b"}, "store": True},
        {"max_tokens": 3},
        {"prompt_logprobs": 1},
        {"add_generation_prompt": False},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}]},
    ],
)
def test_further_fields_are_accepted(client, extra):
    answer = client.chat.completions.create(
        **GREEDY | {"max_completion_tokens": 4, "extra_body": extra}
    )
    assert answer.choices[0].message.content is not None


def test_without_a_limit_an_answer_may_fill_the_context(client):
    options = {k: v for k, v in GREEDY.items() if k != "max_completion_tokens"}
    answer = client.chat.completions.create(**options | {"stop": ["><"]})
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "a strange role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools: "),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"top_logprobs": 2}, "only with logprobs=true"),
        ({"logprobs": True, "top_logprobs": 30}, "logprobs=30"),
        ({"audio": {}}, "audio: this field is unknown"),
        ({"functions": []}, "functions: this field is unknown"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_400_and_named(client, extra, message, stream):
    with pytest.raises(openai.BadRequestError) as error:
        list(client.chat.completions.create(**GREEDY | {"extra_body": extra, "stream": stream}))
    assert message in error.value.body["message"]
