from types import SimpleNamespace

import numpy as np
import pytest

from tinyvllm.driver import calls
from tinyvllm.driver.graph import capture
from tinyvllm.driver.memory import MemPool, copy_device, copy_to_host, memset


@pytest.fixture
def pair(device, stream):
    """Two allocations of 64 bytes."""
    with MemPool(device, 0, max_bytes=32 << 20) as pool:
        yield pool.alloc(64, stream), pool.alloc(64, stream)
        stream.synchronize()


def read(ptr, stream):
    values = np.empty(64, np.uint8)
    copy_to_host(values, ptr, stream)
    stream.synchronize()
    return values


@pytest.mark.gpu
def test_captured_work_runs_at_launch_only(pair, stream):
    a, b = pair
    memset(a, 1, 64, stream)
    memset(b, 2, 64, stream)
    with capture(stream) as graph:
        copy_device(b, a, 64, stream)
        memset(a, 3, 64, stream)
    assert graph.num_nodes == 2
    assert (read(b, stream) == 2).all()
    with graph, graph.instantiate() as executable:
        executable.run(stream)
        assert (read(a, stream) == 3).all() and (read(b, stream) == 1).all()
        executable.run(stream)
        assert (read(b, stream) == 3).all()


@pytest.mark.gpu
def test_error_in_the_body_leaves_the_stream_usable(pair, stream):
    a, _ = pair
    with pytest.raises(KeyError), capture(stream):
        memset(a, 9, 64, stream)
        raise KeyError
    assert not stream.capturing
    memset(a, 4, 64, stream)
    assert (read(a, stream) == 4).all()


@pytest.mark.parametrize("status", [0, 901])  # 901: the error has invalidated the capture
def test_failed_capture_is_ended_and_its_graph_dropped(monkeypatch, status):
    names = []

    def function(name, *result):
        return lambda *args: names.append(name) or result

    functions = calls._Functions(
        cuStreamBeginCapture=function("begin", 0),
        cuStreamEndCapture=function("end", status, 7),
        cuGraphDestroy=function("destroy", 0),
        cuGetErrorName=lambda status: (0, b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
        cuGetErrorString=lambda status: (0, b"capture invalidated"),
    )
    monkeypatch.setattr(calls, "_functions", functions)
    with pytest.raises(KeyError), capture(SimpleNamespace(handle=1)):
        raise KeyError
    assert names == ["begin", "end"] + ["destroy"] * (status == 0)
