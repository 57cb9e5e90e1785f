"""The three forms of a trace, from calls of a table of functions in place of the driver's."""

import enum
import json
import threading

import pytest

from tinyvllm.driver import calls
from tinyvllm.driver.calls import CudaError, call, driver_api, phase
from tinyvllm.driver.recorder import Call, Span
from tinyvllm.driver.trace import Trace
from tinyvllm.driver.trace_formats import HOST_TRACK
from tinyvllm.util import InputError


class Status(enum.IntEnum):
    SUCCESS = 0
    NOT_READY = 600


@pytest.fixture(autouse=True)
def table(monkeypatch):
    cu = driver_api()
    functions = {
        "cuEventCreate": lambda Flags: (Status.SUCCESS, cu.CUevent(77)),
        "cuEventQuery": lambda hEvent: (Status.NOT_READY,),
        "cuMemHostAlloc": lambda bytesize, Flags: (Status.SUCCESS, 4096),
        "cuGetErrorName": lambda status: (Status.SUCCESS, status.name.encode()),
        "cuGetErrorString": lambda status: (Status.SUCCESS, b"not yet"),
    }
    monkeypatch.setattr(calls, "_functions", calls._Functions(functions))


LAUNCH = Call(
    "cuLaunchKernelEx",
    {
        "kernel": "norm<64>",
        "grid": [7, 2, 1],
        "block": [128, 1, 1],
        "sharedMemBytes": 4096,
        "hStream": "stream 1",
        "attributes": ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"],
        "arguments": {"x": "0x1000", "K": 8},
    },
    None,
    "",
    0.0,
    1e-6,
    "decode",
    "MainThread",
)


def write(path, format=None):
    """A trace of a few calls of two threads, a launch, a run on the host and one on a device."""
    with Trace(path, format) as trace:
        with trace.recording():
            event = call("cuEventCreate", 2)
            with phase("decode"), pytest.raises(CudaError):
                call("cuEventQuery", event)
            thread = threading.Thread(target=call, args=("cuMemHostAlloc", 1 << 20, 1), name="two")
            thread.start()
            thread.join()
        call("cuMemHostAlloc", 1, 1)  # after the recording
        trace.call(LAUNCH)
        trace.note("a remark")
        trace.run(
            HOST_TRACK, Span("prefill", 1.0, 0.5, {"T": 3}), [Span("add", 1.1, 0.2, {"a": "a"})]
        )
        trace.run("compute stream", Span("decode", 2.0, 0.5), [Span("norm<64>", 2.0, 0.25)])
    return path.read_text()


def test_listing(tmp_path):
    lines = [
        line.split(maxsplit=4) for line in write(tmp_path / "t.txt").splitlines() if line[0] != "#"
    ]
    assert [line[2:] for line in lines[:3]] == [
        ["start-up", "MainThread", "cuEventCreate(Flags=CU_EVENT_DISABLE_TIMING) = event 1"],
        ["decode", "MainThread", "cuEventQuery(hEvent=event 1) failed: NOT_READY"],
        ["start-up", "two", "cuMemHostAlloc(bytesize=1048576 (1.00 MiB), Flags=1) = 0x1000"],
    ]
    assert lines[3][4] == (
        "cuLaunchKernelEx(norm<64>(x=0x1000, K=8), grid 7x2x1, block 128x1x1, "
        "4096 B dynamic shared memory, stream 1, may start early)"
    )
    assert [line[-1].strip() for line in lines[4:]][:2] == ["run prefill(T=3)", "add(a)"]
    text = (tmp_path / "t.txt").read_text()
    assert "# a remark\n" in text and "compute stream" in text
    assert "# decode         1 x cuEventQuery" in text.splitlines()[-3]


def test_json_lines(tmp_path):
    events = [json.loads(line) for line in write(tmp_path / "t.jsonl").splitlines()]
    assert [e["event"] for e in events] == [*["call"] * 4, "note", "run", "op", "run", "op"]
    assert events[0]["args"] == {"Flags": "CU_EVENT_DISABLE_TIMING"}
    assert events[0]["result"] == "event 1" and events[1]["error"] == "NOT_READY"
    assert events[3]["args"]["arguments"] == {"x": "0x1000", "K": 8}
    starts = [e["start"] for e in events[:3]]
    assert starts == sorted(starts) and 0 <= starts[0] < 60
    assert events[8]["track"] == "compute stream" and events[8]["seconds"] == 0.25


def test_perfetto_has_a_track_for_each_thread_and_stream(tmp_path):
    events = json.loads(write(tmp_path / "t.json"))
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {
        e["pid"]: e["args"]["name"].split(":")[0] for e in events if e["name"] == "process_name"
    }
    slices = [
        (processes[e["pid"]], tracks[e["pid"], e["tid"]], e["name"])
        for e in events
        if e["ph"] == "X"
    ]
    main = threading.current_thread().name
    assert slices == [
        ("host", main, "cuEventCreate"),
        ("host", main, "cuEventQuery"),
        ("host", "two", "cuMemHostAlloc"),
        ("host", main, "norm<64>"),
        ("host", main, "prefill"),
        ("host", main, "add"),
        ("device", "compute stream", "decode"),
        ("device", "compute stream", "norm<64>"),
    ]
    assert any("separate eager pass, without" in str(e["args"]) for e in events if e["ph"] == "M")
    kernel = events[-1]
    assert kernel["dur"] == 250000 and kernel["ts"] == pytest.approx(events[-2]["ts"])
    assert [e["name"] for e in events if e["ph"] == "i"] == ["a remark"]


def test_what_happened_is_in_the_file_before_the_end(tmp_path):
    path = tmp_path / "t.txt"
    with Trace(path) as trace, trace.recording():
        call("cuEventCreate", 2)
        assert "cuEventCreate" in path.read_text()
    trace.close()  # twice


def test_the_format_can_be_given(tmp_path):
    assert json.loads(write(tmp_path / "anything", "perfetto"))
    with pytest.raises(InputError, match="trace format 'pdf': must be one of text, jsonl"):
        Trace(tmp_path / "t", "pdf")


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(InputError, match=r"trace='.*none/t': No such file"):
        Trace(tmp_path / "none" / "t")


def test_one_trace_at_a_time(tmp_path):
    with (
        Trace(tmp_path / "a") as one,
        one.recording(),
        Trace(tmp_path / "b") as two,
        pytest.raises(InputError, match="recorded already"),
        two.recording(),
    ):
        pass
