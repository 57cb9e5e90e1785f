"""Device time of CUDA graphs and of the launches in them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable

from tinyvllm.driver.device import Event, Stream
from tinyvllm.driver.graph import GraphExec, capture
from tinyvllm.driver.kernel import PreparedLaunch

WARMUP_REPLAYS = 3


def captured(launches: Iterable[PreparedLaunch], stream: Stream) -> GraphExec:
    """The launches as a graph that is ready to run."""
    with capture(stream) as graph:
        for launch in launches:
            launch.run(stream)
    with graph:
        return graph.instantiate()


def replay_seconds(
    graph: GraphExec, stream: Stream, replays: int, warmup: int = WARMUP_REPLAYS
) -> float:
    """Median time of a replay of the graph, from the end of the replay before it to its own.

    All replays are queued at once: the host is ahead of the device and out of the measurement.
    """
    events = [Event(timing=True) for _ in range(warmup + replays + 1)]
    events[0].record(stream)
    for event in events[1:]:
        graph.run(stream)
        event.record(stream)
    stream.synchronize()
    times = [end.elapsed_ms(start) for start, end in itertools.pairwise(events)]
    for event in events:
        event.close()
    return statistics.median(times[warmup:]) / 1e3
