"""The last things that happened to requests and blocks which a person may want to know of."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MAX_EVENTS = 100


class Event(NamedTuple):
    """What happened when: `time` as seconds since 1970, `number` counts from the start.

    kind: "swap" and "recompute", a running request was preempted in this way; "return", it runs
    again; "fail", it ended because its blocks could not be copied; "above" and "below", the blocks
    in use have passed the watermark (`request_id` is empty).
    """

    number: int
    time: float
    kind: str
    request_id: str
    detail: str


class EventLog:
    """Keeps the last `MAX_EVENTS` events.

    The watermark is passed upwards with more than `high` blocks in use, downwards with at most
    `low`, so that use that moves around it is not an event each time.
    """

    def __init__(
        self, num_blocks: int, high: int, low: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_blocks = num_blocks
        self._high, self._low = high, low
        self._above = False
        self._clock = clock
        self._count = 0

    def add(self, kind: str, request_id: str, detail: str) -> None:
        """Something happened, now."""
        self.events.append(Event(self._count, self._clock(), kind, request_id, detail))
        self._count += 1

    def watch(self, num_used: int) -> None:
        """So many blocks are in use; called once a step."""
        if self._above:
            if num_used <= self._low:
                self._above = False
                self.add("below", "", self._share(num_used))
        elif num_used > self._high:
            self._above = True
            self.add("above", "", self._share(num_used))

    def _share(self, num_used: int) -> str:
        return f"{num_used} of {self._num_blocks} blocks in use"
