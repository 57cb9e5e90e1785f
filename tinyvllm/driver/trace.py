"""Writes what happens inside to a file as it happens: CUDA calls, and runs with their ops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from tinyvllm.driver.calls import current_phase
from tinyvllm.driver.recorder import Call, Span, recording
from tinyvllm.driver.trace_formats import JsonLines, Perfetto, Run, Text
from tinyvllm.util import Closing, InputError

SUFFIXES = {".jsonl": "jsonl", ".json": "perfetto"}  # any other: text


class Format(Protocol):
    """What becomes of an event in a file; times are seconds since the trace began."""

    def head(self) -> str: ...

    def call(self, call: Call, at: float) -> str: ...

    def run(self, run: Run, begin: float) -> str: ...

    def note(self, text: str) -> str: ...

    def tail(self) -> str: ...


FORMATS: dict[str, type[Format]] = {"text": Text, "jsonl": JsonLines, "perfetto": Perfetto}


class Trace(Closing):
    """A file that events are written to while they happen, from any thread.

    `format` is one of FORMATS; the file's suffix decides without it: .jsonl, .json for Perfetto,
    else text. Raises InputError for another format and for a file that cannot be opened.
    """

    def __init__(self, path: str | Path, format: str | None = None) -> None:
        format = format or SUFFIXES.get(Path(path).suffix, "text")
        if format not in FORMATS:
            raise InputError(f"trace format {format!r}: must be one of {', '.join(FORMATS)}")
        self._format = FORMATS[format]()
        self._begin = time.perf_counter()
        self._lock = threading.Lock()
        try:
            # Line by line: what was written is there after a crash, too.
            self._file: TextIO = open(path, "w", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise InputError(f"trace={str(path)!r}: {error.strerror}") from None
        self._write(self._format.head())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Writes every CUDA and NVRTC call while the context is open."""
        with recording(self.call):
            yield

    def call(self, call: Call) -> None:
        """Writes a call."""
        self._write(self._format.call(call, call.start - self._begin))

    def run(self, track: str, run: Span, parts: list[Span]) -> None:
        """Writes a run of a program with its ops or kernels; `track` says what they ran on."""
        whole = Run(track, current_phase(), threading.current_thread().name, run, parts)
        self._write(self._format.run(whole, self._begin))

    def note(self, text: str) -> None:
        """Writes a remark for the reader."""
        self._write(self._format.note(text))

    def close(self) -> None:
        if not self._file.closed:
            self._write(self._format.tail())
            self._file.close()

    def _write(self, text: str) -> None:
        with self._lock:
            self._file.write(text)
