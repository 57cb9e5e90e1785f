"""CUDA graphs: capture the work given to a stream, then launch all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tinyvllm.driver.calls import CudaError, call, driver_api
from tinyvllm.driver.device import Stream
from tinyvllm.util import Closing


class GraphExec(Closing):
    """A graph that can be launched."""

    def __init__(self, graph: Any) -> None:
        self.handle: Any = call("cuGraphInstantiate", graph, 0)

    def run(self, stream: Stream) -> None:
        """Gives all of the graph's work to `stream`."""
        call("cuGraphLaunch", self.handle, stream.handle)

    def close(self) -> None:
        """Destroys the graph; if it is running, the driver does so when it has ended."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            call("cuGraphExecDestroy", handle)


class Graph(Closing):
    """What a capture recorded; `handle` is set when the capture ends."""

    def __init__(self) -> None:
        self.handle: Any = None

    @property
    def num_nodes(self) -> int:
        """Kernels, copies and fills in the graph."""
        return int(call("cuGraphGetNodes", self.handle)[1])

    def instantiate(self) -> GraphExec:
        assert self.handle is not None, "the capture has not ended"
        return GraphExec(self.handle)

    def close(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            call("cuGraphDestroy", handle)


@contextmanager
def capture(stream: Stream) -> Iterator[Graph]:
    """Records the work that this thread gives to `stream` into the graph that is yielded.

    Nothing runs meanwhile. After an error in the body the stream is usable again and the graph
    is dropped.
    """
    # Thread-local: other threads may allocate and load kernels during the capture.
    mode = driver_api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call("cuStreamBeginCapture", stream.handle, mode)
    graph = Graph()
    stream.capturing = True
    try:
        yield graph
    except BaseException:
        _abandon(stream)
        raise
    finally:
        stream.capturing = False
    graph.handle = call("cuStreamEndCapture", stream.handle)


def _abandon(stream: Stream) -> None:
    """Ends a capture whose body failed; the body's error is the one to report."""
    try:
        graph = call("cuStreamEndCapture", stream.handle)
    except CudaError:  # the error in the body invalidated the capture; ending it was the point
        return
    call("cuGraphDestroy", graph)
