"""The process in which a model's chat template runs: Jinja's sandbox, bounded time and memory.

A template is a program by the model's author, and Jinja's sandbox keeps it from the machine but not
from looping or filling memory. The kernel does: a timer ends this process, and its address space is
limited. It speaks JSON, one value a line: template and variables in, a text or an error out.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_LIMIT = 1 << 30  # bytes of address space, of which the interpreter takes about 40 MB
MAX_CHARACTERS = 1 << 24  # of a rendered chat


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RaisedError(Exception):
    """What a template calls `raise_exception` with."""


def _raise_exception(message: object) -> None:
    raise _RaisedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for."""
    result = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    result.filters["tojson"] = _tojson
    result.globals["raise_exception"] = _raise_exception
    result.globals["strftime_now"] = _strftime_now
    return result


def _render(line: str) -> dict[str, str]:
    """Handles one line: {"text": ...}, or {"error": ...} that completes "the chat template ..."."""
    try:
        request = json.loads(line)
        text = _compiled(request["template"]).render(request["variables"])
    except _RaisedError as error:
        return {"error": f"refuses the chat: {error}"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is broken in line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": f"needs more than {MEMORY_LIMIT >> 20} MiB"}
    except Exception as error:  # whatever the program that a template is may raise
        return {"error": f"fails: {type(error).__name__}: {error}"}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"renders {len(text)} characters: at most {MAX_CHARACTERS} are allowed"}
    return {"text": text}


@functools.lru_cache
def _compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def serve(time_limit_s: float) -> None:
    """Answers line by line until the input ends; SIGPROF ends it if one takes too much CPU time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        # No handler: the kernel ends the process even inside one long operation of the interpreter.
        # CPU time, since on a busy machine a harmless template may wait; the sandbox cannot sleep.
        signal.setitimer(signal.ITIMER_PROF, time_limit_s)
        answer = json.dumps(_render(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
