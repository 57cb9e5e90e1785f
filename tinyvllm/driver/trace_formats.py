"""The forms of a trace: a listing to read, JSON lines for programs, a Perfetto (Chrome) trace."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from tinyvllm.driver.recorder import Call, Span
from tinyvllm.util import format_bytes

# Arguments that count bytes; and pool attributes that do.
_BYTES = {"bytesize", "ByteCount", "minBytesToKeep", "maxSize", "WidthInBytes", "N"}
_BYTE_ATTRIBUTES = ("_THRESHOLD", "_CURRENT", "_HIGH")
HOST, DEVICE = 1, 2  # Perfetto's process numbers
DEVICE_NAME = "device: a separate eager pass, without programmatic dependent launch"
HOST_TRACK = "host"  # of runs whose ops the calling thread computes


@dataclass(frozen=True)
class Run:
    """A run of a program: what it ran on, who asked for it when, it and its parts with times."""

    track: str
    phase: str
    thread: str
    whole: Span
    parts: list[Span]


class Text:
    """A line an event: milliseconds since the start, microseconds taken, phase, thread, what.

    In the end the calls of each phase are counted.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()  # by phase and name
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def head(self) -> str:
        return (
            "# ms since the start, us taken, phase, thread, call with its arguments = result\n"
            "# handles are numbered by kind as they appear; addresses are hexadecimal\n"
        )

    def call(self, call: Call, at: float) -> str:
        self._counts[call.phase, call.name] += 1
        self._seconds[call.phase, call.name] += call.seconds
        return _line(at, call.seconds, call.phase, call.thread, call_text(call))

    def run(self, run: Run, begin: float) -> str:
        texts = [f"run {_span_text(run.whole)}", *(f"  {_span_text(part)}" for part in run.parts)]
        return "".join(
            _line(span.start - begin, span.seconds, run.phase, run.track, text)
            for span, text in zip((run.whole, *run.parts), texts, strict=True)
        )

    def note(self, text: str) -> str:
        return f"# {text}\n"

    def tail(self) -> str:
        lines = [
            f"# {phase:<9} {count:>6} x {name:<26} {self._seconds[phase, name] * 1e6:>10.1f} us\n"
            for (phase, name), count in self._counts.items()
        ]
        return "".join(
            ["# calls of each phase, and the host's time in them\n" * bool(lines), *lines]
        )


class JsonLines:
    """An object a line, with "event" one of call, run, op and note; times in seconds."""

    def head(self) -> str:
        return ""

    def call(self, call: Call, at: float) -> str:
        return _json({"event": "call", **asdict(call), "start": at})

    def run(self, run: Run, begin: float) -> str:
        spans = [("run", run.whole), *(("op", part) for part in run.parts)]
        where = {"track": run.track, "phase": run.phase}
        return "".join(
            _json({"event": event, **asdict(span), "start": span.start - begin, **where})
            for event, span in spans
        )

    def note(self, text: str) -> str:
        return _json({"event": "note", "text": text})

    def tail(self) -> str:
        return ""


class Perfetto:
    """Chrome's trace events: a track for each host thread and for each stream of the device."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[int, str], int] = {}

    def head(self) -> str:
        # A list, which may break off: what there is of it can be shown after a crash.
        names = ((HOST, "host"), (DEVICE, DEVICE_NAME))
        first, device = (
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for pid, name in names
        )
        return "[\n" + json.dumps(first) + _event(device)

    def call(self, call: Call, at: float) -> str:
        name = call.args.get("kernel", call.name)
        args = {"call": call.name, **call.args, "result": call.result, "error": call.error}
        return self._slice(HOST, call.thread, name, at, call.seconds, args, call.phase)

    def run(self, run: Run, begin: float) -> str:
        process, name = DEVICE, run.track
        if run.track == HOST_TRACK:
            process, name = HOST, run.thread
        return "".join(
            self._slice(process, name, s.name, s.start - begin, s.seconds, s.args, run.phase)
            for s in (run.whole, *run.parts)
        )

    def note(self, text: str) -> str:
        return _event({"ph": "i", "s": "g", "name": text, "pid": HOST, "tid": 0, "ts": 0})

    def tail(self) -> str:
        return "\n]\n"

    def _slice(
        self,
        process: int,
        track: str,
        name: str,
        at: float,
        seconds: float,
        args: dict[str, Any],
        category: str,
    ) -> str:
        text = ""
        if (process, track) not in self._tracks:
            self._tracks[process, track] = len(self._tracks) + 1
            tid = self._tracks[process, track]
            event = {"ph": "M", "name": "thread_name", "pid": process, "tid": tid}
            text = _event({**event, "args": {"name": track}})
        return text + _event(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": process,
                "tid": self._tracks[process, track],
                "ts": round(at * 1e6, 3),
                "dur": round(seconds * 1e6, 3),
                "args": args,
            }
        )


def _event(event: dict[str, Any]) -> str:
    return ",\n" + json.dumps(event)


def _json(event: dict[str, Any]) -> str:
    return json.dumps(event) + "\n"


def _line(at: float, seconds: float, phase: str, thread: str, what: str) -> str:
    return f"{at * 1e3:11.3f} {seconds * 1e6:9.1f}  {phase:<9} {thread:<10}  {what}".rstrip() + "\n"


def call_text(call: Call) -> str:
    """`name(argument=value, ...) = result`, as a listing shows it."""
    if "kernel" in call.args:
        text = _launch_text(call.args)
    else:
        attribute = str(call.args.get("attr", ""))
        text = ", ".join(f"{n}={_shown(n, value, attribute)}" for n, value in call.args.items())
    result = "" if call.result is None else f" = {_plain(call.result)}"
    return f"{call.name}({text})" + (f" failed: {call.error}" if call.error else result)


def _launch_text(args: dict[str, Any]) -> str:
    """`kernel<...>(x=0x..., n=3), grid 4x1x1, block 256, ...`"""
    arguments = ", ".join(f"{n}={value}" for n, value in args["arguments"].items())
    grid, block = ("x".join(map(str, args[n])) for n in ("grid", "block"))
    early = ", may start early" if args["attributes"] else ""
    return (
        f"{args['kernel']}({arguments}), grid {grid}, block {block}, "
        f"{args['sharedMemBytes']} B dynamic shared memory, {args['hStream']}{early}"
    )


def _shown(name: str, value: Any, attribute: str) -> str:
    counts_bytes = name in _BYTES or (name == "value" and attribute.endswith(_BYTE_ATTRIBUTES))
    if counts_bytes and isinstance(value, int) and value >= 1024:
        return f"{value} ({format_bytes(value)})"
    if isinstance(value, dict):
        inner = ", ".join(f"{n}={_shown(n, item, attribute)}" for n, item in value.items())
        return f"{{{inner}}}"
    return _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value)


def _span_text(span: Span) -> str:
    # Operands often have the names of their buffers: once is enough.
    args = [n if value == n else f"{n}={_plain(value)}" for n, value in span.args.items()]
    return f"{span.name}({', '.join(args)})"
