"""Records every CUDA and NVRTC call of every thread while it is asked to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tinyvllm.driver.calls import current_phase, function, set_recorder
from tinyvllm.driver.decode import Decoder
from tinyvllm.util import InputError


@dataclass(frozen=True)
class Call:
    """One call. `start` is host time (`time.perf_counter`), `seconds` its duration.

    `args` are by parameter name; they and `result` are plain values: handles numbered by kind,
    addresses as hexadecimal text, enumerations by name, long bytes by length, structures as
    dictionaries. `error` is the name of a status other than success, and else empty.
    """

    name: str
    args: dict[str, Any]
    result: Any
    error: str
    start: float
    seconds: float
    phase: str
    thread: str


@dataclass(frozen=True)
class Span:
    """Something that took time: `start` is `time.perf_counter` on the host, at which the time of
    a device is made to begin; `args` say more."""

    name: str
    start: float
    seconds: float
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recorder:
    """Gives each call to `sink`, one at a time, in the order in which they ended.

    Without a sink they are kept in `calls`.
    """

    sink: Callable[[Call], None] | None = None
    calls: list[Call] = field(default_factory=list)
    _decoder: Decoder = field(default_factory=Decoder)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Makes a call and records it."""
        body = function(name)
        with self._lock:  # before: a call may change what its arguments point to
            arguments = self._decoder.arguments(name, args)
        start = time.perf_counter()
        result = body(*args)
        seconds = time.perf_counter() - start
        status = result[0]
        with self._lock:
            (self.sink or self.calls.append)(
                Call(
                    name,
                    arguments,
                    self._decoder.result(name, result[1:]),
                    getattr(status, "name", f"status {int(status)}") if status else "",
                    start,
                    seconds,
                    current_phase(),
                    threading.current_thread().name,
                )
            )
        return result


_recording: Recorder | None = None


@contextmanager
def recording(sink: Callable[[Call], None] | None = None) -> Iterator[Recorder]:
    """Records every call of every thread while the context is open; InputError inside another."""
    global _recording
    if _recording is not None:
        raise InputError("calls are being recorded already: close that trace first")
    _recording = recorder = Recorder(sink)
    set_recorder(recorder.call)
    try:
        yield recorder
    finally:
        _recording = None
        set_recorder(None)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Leaves what is called while the context is open out of the recording, if there is one."""
    set_recorder(None)
    try:
        yield
    finally:
        set_recorder(_recording.call if _recording else None)
