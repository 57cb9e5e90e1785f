"""Chat templates: the shapes of three families, where they stand, and hostile ones."""

import importlib.util
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from tinyvllm.model import chat
from tinyvllm.model.chat import ChatTemplate, check_messages
from tinyvllm.model.gguf_file import GgufFile
from tinyvllm.util import InputError

USER = [{"role": "user", "content": "Hi"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "<b>&'ü"},
]
LLAMA3 = """\
{%- if not date is defined %}
    {%- set date = strftime_now("%Y") %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if tools is not none %}
    {{- date ~ tools | tojson }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' }}{% if loop.last and system %}{{ system + '\\n\\n' }}{% endif %}
        {{- message.content + ' [/INST]' }}
        {%- continue %}
    {%- endif %}
    {% generation %}
{{ message.content + eos_token }}
    {% endgeneration %}
{%- endfor %}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate({"default": source}, TOKENS, "here", **options)


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return template(source, time_limit_s=1.0).render(messages, **variables)


def test_chatml_of_the_default_model(smollm2_gguf: Path, golden: Path) -> None:
    smollm2 = ChatTemplate.from_gguf(GgufFile.parse(smollm2_gguf))
    with open(golden / "smollm2_greedy.jsonl", newline="\n") as file:
        entries = [json.loads(line) for line in file]
    chats = [e for e in entries if e["messages"]]
    assert chats
    for entry in chats:
        assert smollm2.render(entry["messages"]) == entry["prompt"]
    text = smollm2.render(USER, add_generation_prompt=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_llama3() -> None:
    def turn(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"

    turns = "".join(turn(m["role"], m["content"].strip() + "<|eot_id|>") for m in CONVERSATION)
    llama = template(LLAMA3)
    assert llama.render(CONVERSATION) == "<s>" + turns + turn("assistant", "")
    assert llama.render(CONVERSATION, add_generation_prompt=False) == "<s>" + turns
    tools = [{"type": "function", "function": {"name": "f", "description": "<ü>"}}]
    text = llama.render(USER, tools=tools, add_generation_prompt=False)
    assert text.endswith(f"<|eot_id|>{time.strftime('%Y')}{json.dumps(tools, ensure_ascii=False)}")
    assert llama.render(USER, tools=tools, date="1 Jan ").count("1 Jan [{") == 1


def test_mistral() -> None:
    assert template(MISTRAL).render(CONVERSATION) == (
        "<s>[INST]  Hi  [/INST]Hello.</s>\n[INST] Be brief.\n\n<b>&'ü [/INST]"
    )
    with pytest.raises(InputError, match="here: the chat template refuses the chat: roles must"):
        template(MISTRAL).render([*USER, *USER])


def test_content_parts_and_further_keys() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
    ]
    source = "{% for m in messages %}{{ m.name }} {{ m.content }} {{ m.tool_calls }};{% endfor %}"
    assert render(source, messages) == "Ann a\nb ;" + " None [{'id': 'x'}];"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], r"messages=\[\]: must be a list with at least one message"),
        ("Hi", "messages='Hi': must be a list"),
        ([*USER, "Hi"], r"messages\[1\]='Hi': must be a dict"),
        ([{"content": "Hi"}], r"messages\[0\]: role=None: must be a text"),
        ([{"role": 5, "content": "Hi"}], r"messages\[0\]: role=5"),
        ([*USER, {"role": "user"}], r"messages\[1\]: content=None: must be a text or a list"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\]: content=\{'a': 1\}"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
            r"messages\[0\]: content\[1\]=\{'type': 'image'\}: must be",
        ),
    ],
)
def test_bad_messages(messages: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        check_messages(messages)


def test_what_is_no_json() -> None:
    with pytest.raises(InputError, match=r"messages, tools and options must be JSON: .* set"):
        render("", extra={1, 2})


def write_config(path: Path, value: Any) -> None:
    config = {"chat_template": value, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def test_where_templates_stand(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the model has no chat template \(chat_template\.jinja"):
        ChatTemplate.load(tmp_path)
    write_config(tmp_path, None)
    with pytest.raises(InputError, match="the model has no chat template"):
        ChatTemplate.load(tmp_path)
    write_config(tmp_path, "config {{ bos_token }}{{ eos_token }}{{ pad_token }}")
    assert ChatTemplate.load(tmp_path).render(USER) == "config <s></s>"
    (tmp_path / "chat_template.jinja").write_text("file ü {{ bos_token }}")
    assert ChatTemplate.load(tmp_path).render(USER) == "file ü <s>"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja: not UTF-8"):
        ChatTemplate.load(tmp_path)


def test_named_templates(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_config(tmp_path, named)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template(named)

    loaded = ChatTemplate.load(tmp_path)
    from_gguf = ChatTemplate.from_gguf(GgufFile.parse(write_gguf(change=change)))
    for both in (loaded, from_gguf):
        assert (both.render(USER), both.render(USER, tools=[{}])) == ("plain", "tools")
    write_config(tmp_path, named[1:])
    with pytest.raises(InputError, match="no template is named 'default', only tool_use"):
        ChatTemplate.load(tmp_path).render(USER)
    for value in (5, [5], [{"name": "default"}]):
        write_config(tmp_path, value)
        with pytest.raises(InputError, match=r"chat_template\[0\]=.*: must be"):
            ChatTemplate.load(tmp_path)
    with pytest.raises(InputError, match=r"no chat template \(tokenizer\.chat_template in its"):
        ChatTemplate.from_gguf(GgufFile.parse(write_gguf()))


DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = BODY %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ ''.__class__.__mro__ }}", "fails: SecurityError"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{{ raise_exception.__globals__.json }}", "fails: SecurityError"),
        ("{% include '/etc/passwd' %}", "fails: TypeError: no loader"),
        ("{% for %}", "is broken in line 1"),
        ("{{ messages[9].role.x }}", "fails: UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails: OverflowError: Range too big"),
        ("{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}", "takes"),
        ("{{ 7 ** (9 ** 9) }}", "takes more than 1 s of CPU"),
        ("{{ 'a' * 10 ** 11 }}", "needs more than 1024 MiB"),
        ("{{ 'a'.center(10 ** 11) }}", "needs more than 1024 MiB"),
        ("{{ '%099999999999d' % 1 }}", "(needs more than|fails)"),
        ("{{ messages[0].content * (5 * 10 ** 7) }}", "renders 100000000 characters: at most"),
        (DOUBLE.replace("BODY", "ns.x ~ ns.x"), "(needs|takes) more than"),
    ],
)
def test_hostile_templates(source: str, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=f"here: the chat template {text}"):
        render(source)
    assert time.monotonic() - start < 20


def test_the_process_that_renders(capfd: pytest.CaptureFixture[str]) -> None:
    source = "{{ messages[0].content }}{% if x %}{{ x ** (9 ** 9) }}{% endif %}"
    robust = template(source, time_limit_s=0.3)
    robust.render(USER)
    first = robust._worker._process
    assert robust.render(USER) == "Hi" and robust._worker._process is first
    with pytest.raises(InputError, match=r"takes more than 0\.3 s"):
        robust.render(USER, x=7)
    assert robust.render(USER) == "Hi"  # in a new one
    second = robust._worker._process
    assert first is not None and second is not None
    assert first.returncode == -signal.SIGPROF and second is not first
    second.kill()
    with pytest.raises(InputError, match=r"ended the process that it ran in \(status -9\)"):
        robust.render(USER)
    robust.render(USER)
    last = robust._worker._process
    del robust
    assert last is not None and last.returncode is not None
    assert capfd.readouterr().err == ""


def test_threads_share_a_template() -> None:
    shared, results = template("{{ messages[0].content }}"), []

    def chats(name: str) -> None:
        for i in range(50):
            content = f"{name}{i}" * 1000
            results.append(shared.render([{"role": "user", "content": content}]) == content)

    threads = [threading.Thread(target=chats, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 150


def test_without_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tinyvllm\[chat\]'"):
        template("")


def test_large_template_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MAX_TEMPLATE_BYTES", 10)
    (tmp_path / "chat_template.jinja").write_text("x" * 11)
    with pytest.raises(InputError, match="larger than 10 bytes"):
        ChatTemplate.load(tmp_path)
