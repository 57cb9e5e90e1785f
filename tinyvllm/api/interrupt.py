"""Ctrl-C taken at a place of our choosing, so that it never splits a step of the engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pending: bool = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """While open, a first Ctrl-C only sets `pending`; a second one interrupts as always.

    Outside the main thread, where Python delivers no signals, nothing changes. Nor does it where
    the program handles SIGINT in a way of its own.
    """
    interrupt = Interrupt()
    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupt.pending = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, usual)
