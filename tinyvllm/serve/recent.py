"""Quantiles of the last minute's times, in constant memory and a microsecond a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LEAST, MOST = 1e-6, 1e4  # seconds; what lies outside counts as the nearer one
STEP = math.log(1.02)  # from one bucket to the next: the error is 1 % at the most
HALF_S = 30.0


class Recent:
    """Counts times in narrow buckets. What is older than a minute is forgotten, half a minute at
    once, so that there are the last 30 to 60 seconds. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._size = self._index(MOST) + 1
        self._old = [0] * self._size
        self._new = [0] * self._size

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a time of `value` seconds in."""
        self._turn()
        self._new[self._index(value)] += times

    def quantiles(self, *shares: float) -> tuple[int, list[float]]:
        """How many times there are, and for each share from 0 to 1 the value that so many do not
        exceed: seconds; none at all without times."""
        self._turn()
        counts = [old + new for old, new in zip(self._old, self._new, strict=True)]
        total = sum(counts)
        return total, [self._quantile(counts, share * total) for share in shares if total]

    def _quantile(self, counts: list[int], rank: float) -> float:
        seen = 0
        for index, count in enumerate(counts):
            seen += count
            if count and seen >= rank:
                return LEAST * math.exp(STEP * index)
        raise AssertionError((rank, seen))

    def _index(self, value: float) -> int:
        return round(math.log(min(max(value, LEAST), MOST) / LEAST) / STEP)

    def _turn(self) -> None:
        passed = self._clock() - self._began
        if passed >= HALF_S:
            # After a whole minute without a time nothing is left.
            self._old = self._new if passed < 2 * HALF_S else [0] * self._size
            self._new = [0] * self._size
            self._began += passed - passed % HALF_S
