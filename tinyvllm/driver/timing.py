"""Device time of single launches, by an event on either side of each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tinyvllm.driver.calls import call, driver_api
from tinyvllm.driver.device import Event, Stream
from tinyvllm.driver.kernel import KernelLoader, PreparedLaunch
from tinyvllm.driver.memory import PinnedBuffer
from tinyvllm.driver.recorder import Span
from tinyvllm.util import Closing

CHUNK = 64  # launches queued at a time; with their events far fewer than a stream can hold


class LaunchTimer(Closing):
    """Times launches one by one.

    The host needs longer to give a launch than a small kernel to run. So the stream is held back
    until a chunk of launches is queued; then the device never waits for the host. A time holds
    the device's own step over the event to the next launch, about 3 microseconds on an H200 (a norm
    that takes 1 in a graph shows 4 to 5): compare times with each other, not with a step's.
    """

    def __init__(self) -> None:
        self._flag = PinnedBuffer(4)
        self._events = [Event(timing=True) for _ in range(CHUNK + 1)]

    def run(
        self,
        name: str,
        about: Mapping[str, int],
        launches: Iterable[PreparedLaunch],
        loader: KernelLoader,
        stream: Stream,
    ) -> tuple[Span, list[Span]]:
        """Runs a program's launches, none before the end of the one before it; returns the whole
        (called `name`, with `about`) and each kernel, with their times."""
        alone = [loader.prepare(replace(one.launch, pdl=False)) for one in launches]
        start = end = time.perf_counter()
        kernels = []
        for one, seconds in zip(alone, self.seconds(alone, stream), strict=True):
            launch = one.launch
            args = {"grid": launch.grid, "block": launch.block, "smem": launch.smem}
            kernels.append(Span(launch.spec.name, end, seconds, args))
            end += seconds
        return Span(name, start, end - start, dict(about)), kernels

    def seconds(self, launches: Sequence[PreparedLaunch], stream: Stream) -> list[float]:
        """Runs the launches in order and returns the time of each; waits for the last."""
        found = []
        for first in range(0, len(launches), CHUNK):
            part = launches[first : first + CHUNK]
            self._run(part, stream)
            pairs = itertools.pairwise(self._events[: len(part) + 1])
            found += [end.elapsed_ms(start) / 1e3 for start, end in pairs]
        return found

    def _run(self, launches: Sequence[PreparedLaunch], stream: Stream) -> None:
        flag = self._flag.array.view(np.uint32)
        flag[0] = 0
        equal = driver_api().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        call("cuStreamWaitValue32", stream.handle, self._flag.address, 1, int(equal))
        try:
            self._events[0].record(stream)
            for launch, event in zip(launches, self._events[1:], strict=False):
                launch.run(stream)
                event.record(stream)
        finally:
            flag[0] = 1  # also after an error, or the stream would wait for ever
        stream.synchronize()

    def close(self) -> None:
        for event in self._events:
            event.close()
        self._flag.close()
