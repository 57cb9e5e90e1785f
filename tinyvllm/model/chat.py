"""A model's chat template: found, given checked messages, and rendered in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.model.config import read_json
from tinyvllm.util import InputError, short_repr

if TYPE_CHECKING:
    from tinyvllm.model.gguf_file import GgufFile

TIME_LIMIT_S = 5.0
_DEFAULT, _TOOL_USE = "default", "tool_use"
_TEMPLATE_FILE = "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 1 << 20
# Special tokens whose texts templates use, and their names in GGUF.
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_GGUF_KEY = "tokenizer.chat_template"
# The path's first entry is the working directory, where a file might hide a module.
_WORKER = "import sys; del sys.path[0]; from tinyvllm.model.chat_worker import serve; serve({})"


def require_jinja() -> None:
    """InputError, saying how to install it, where the optional package is missing."""
    if importlib.util.find_spec("jinja2") is None:
        raise InputError("chat templates need Jinja: pip install 'tinyvllm[chat]'")


class ChatTemplate:
    """Renders conversations as the text that a model was trained on.

    templates: Jinja sources by name; "default" is used, or with tools "tool_use" where it exists.
    tokens: texts of special tokens by the names that templates know, as "bos_token".
    where: where the templates come from, for people.

    A template cannot reach the machine, and one that takes more than `time_limit_s` seconds of CPU
    time or too much memory is stopped. Threads may share the object.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        tokens: Mapping[str, str],
        where: str,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        require_jinja()
        self._templates = dict(templates)
        self._tokens = dict(tokens)
        self._where = where
        self._worker = _Worker(time_limit_s)

    @classmethod
    def load(cls, directory: Path | str) -> ChatTemplate:
        """Read `chat_template.jinja`, or else the field of `tokenizer_config.json`.

        InputError if there is neither.
        """
        file, config_path = (Path(directory) / n for n in (_TEMPLATE_FILE, "tokenizer_config.json"))
        config = read_json(config_path) if config_path.is_file() else {}
        if file.is_file():
            templates, where = {_DEFAULT: _read_text(file)}, str(file)
        else:
            where = f"{config_path}: chat_template"
            templates = _named_templates(config.get("chat_template"), where)
        if not templates:
            raise _missing(directory, f"{_TEMPLATE_FILE} or chat_template in tokenizer_config.json")
        texts = {name: config.get(f"{name}_token") for name in _TOKENS}
        texts |= {n: t.get("content") for n, t in texts.items() if isinstance(t, dict)}
        tokens = {f"{n}_token": text for n, text in texts.items() if isinstance(text, str)}
        return cls(templates, tokens, where)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ChatTemplate:
        """Take the templates out of a GGUF file's metadata; InputError if there are none."""
        prefix = f"{_GGUF_KEY}."
        templates = {
            key.removeprefix(prefix): file.get(key, str)
            for key in file.metadata
            if key.startswith(prefix)
        }
        if _GGUF_KEY in file.metadata:
            templates[_DEFAULT] = file.get(_GGUF_KEY, str)
        if not templates:
            raise _missing(file.path, f"{_GGUF_KEY} in its metadata")
        texts = file.get("tokenizer.ggml.tokens", list, [])
        ids = {n: file.get(f"tokenizer.ggml.{gguf}_token_id", int) for n, gguf in _TOKENS.items()}
        tokens = {
            f"{name}_token": texts[i]
            for name, i in ids.items()
            if i is not None and 0 <= i < len(texts)
        }
        return cls(templates, tokens, f"{file.path}: {_GGUF_KEY}")

    def render(
        self,
        /,  # a template's variable may have this name
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text, by default up to where the model's answer begins.

        messages: {"role": ..., "content": text or [{"type": "text", "text": ...}, ...]}; the texts
            of parts are joined by newlines; further keys are for the template.
        tools: functions as JSON schemas. variables: whatever else the template knows.

        InputError for a bad message, naming its index, and if the template refuses the messages,
        fails or exceeds the limits.
        """
        name = _TOOL_USE if tools and _TOOL_USE in self._templates else _DEFAULT
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise InputError(f"{self._where}: no template is named {name!r}, only {names}")
        values = {
            "messages": check_messages(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
            **variables,
        }
        try:
            request = json.dumps({"template": self._templates[name], "variables": values})
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"chat: messages, tools and options must be JSON: {error}") from error
        answer = self._worker.ask(request)
        if "error" in answer:
            raise InputError(f"{self._where}: the chat template {answer['error']}"[:1000])
        return answer["text"]


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with the texts of content parts joined; InputError names index and value."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(
            f"messages={short_repr(messages)}: must be a list with at least one message"
        )
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{name}={short_repr(message)}: must be a dict with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InputError(f"{name}: role={short_repr(role)}: must be a text like 'user'")
    if isinstance(content, (list, tuple)):
        parts = enumerate(content)
        content = "\n".join(_part_text(f"{name}: content[{i}]", part) for i, part in parts)
    # An assistant's message may consist of tool calls alone.
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InputError(
            f"{name}: content={short_repr(content)}: must be a text or a list of parts"
        )
    return {**message, "content": content}


def _part_text(name: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise InputError(f'{name}={short_repr(part)}: must be {{"type": "text", "text": ...}}')


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_TEMPLATE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    if len(data) > _MAX_TEMPLATE_BYTES:
        raise InputError(f"{path}: larger than {_MAX_TEMPLATE_BYTES} bytes")
    return text


def _named_templates(value: Any, where: str) -> dict[str, str]:
    """The config's field: a template, a list of named ones, or null."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    templates: dict[str, str] = {}
    for i, entry in enumerate(value if isinstance(value, list) else [value]):
        pair = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, "")
        name, template = pair
        if not isinstance(name, str) or not isinstance(template, str):
            raise InputError(f'{where}[{i}]={short_repr(entry)}: must be {{"name", "template"}}')
        templates[name] = template
    return templates


def _missing(path: Path | str, what: str) -> InputError:
    return InputError(
        f"{path}: the model has no chat template ({what}): it may not be made for chats; "
        "generate from a prompt instead"
    )


class _Worker:
    """The process in which templates run; started for the first chat, and again after it died."""

    def __init__(self, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, request: str) -> dict[str, str]:
        """Sends a line and waits for the answer to it."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            process = self._process
            answer = ""
            try:
                assert process.stdin is not None and process.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
            finally:
                # After Ctrl-C the answer is still to come, and would be taken for the next one.
                if not answer.endswith("\n"):
                    _stop(process)
                    self._process = None
        if self._process is None:
            return {"error": self._death(process.returncode)}
        result: dict[str, str] = json.loads(answer)
        return result

    def _start(self) -> subprocess.Popen[str]:
        search_path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", _WORKER.format(self._time_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONUTF8": "1"},
            start_new_session=True,  # Ctrl-C is meant for the engine
        )
        weakref.finalize(self, _stop, process)
        return process

    def _death(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return f"takes more than {self._time_limit_s:g} s of CPU time"
        return f"ended the process that it ran in (status {code})"


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):  # what it did not read any more
        process.communicate()
