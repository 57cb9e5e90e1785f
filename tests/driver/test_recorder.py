"""Calls as they are recorded: names, plain arguments, phases, threads."""

import threading

import pytest

from tinyvllm.driver import calls
from tinyvllm.driver.calls import CudaError, call, phase
from tinyvllm.driver.recorder import recording, unrecorded

pytestmark = pytest.mark.usefixtures("few_functions")


def test_calls_are_kept_with_phase_and_thread():
    with recording() as recorder:
        with phase("decode"):
            call("cuOne", 1)
        thread = threading.Thread(target=call, args=("cuTwo",), name="other")
        thread.start()
        thread.join()
        with pytest.raises(CudaError):
            call("cuBusy", 4096)
    call("cuOne", 2)  # recording is over
    one, two, busy = recorder.calls
    assert (one.name, one.args, one.result, one.phase) == ("cuOne", {"x": 1}, 2, "decode")
    assert (two.result, two.phase, two.thread) == ((3, 4), "start-up", "other")
    assert (busy.args, busy.error) == ({"hEvent": 4096}, "NOT_READY") and one.error == ""
    assert one.start <= two.start <= busy.start and one.seconds >= 0


def test_phases_nest_and_end_after_errors():
    with recording() as recorder:
        with pytest.raises(KeyError), phase("weights"):
            with phase("compile"):
                call("cuNothing")
            call("cuNothing")
            raise KeyError
        call("cuNothing")
    assert [c.phase for c in recorder.calls] == ["compile", "weights", "start-up"]


def test_a_sink_gets_each_call_as_it_ends():
    seen = []
    with recording(seen.append) as recorder:
        call("cuNothing")
        assert [c.name for c in seen] == ["cuNothing"]
    assert recorder.calls == []


def test_what_is_left_out_and_what_comes_after():
    with recording() as recorder:
        call("cuOne", 1)
        with unrecorded():
            call("cuOne", 2)
        call("cuOne", 3)
    with unrecorded():
        call("cuOne", 4)
    call("cuOne", 5)
    assert [c.args["x"] for c in recorder.calls] == [1, 3]


def test_without_a_recording_a_call_goes_straight_to_the_function(monkeypatch):
    monkeypatch.setattr("tinyvllm.driver.recorder.Recorder.call", None)
    assert calls._recorder is None
    assert call("cuOne", 4) == 5


def test_every_thread_is_heard_and_none_is_lost():
    def work():
        for i in range(200):
            call("cuOne", i)

    with recording() as recorder:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recorder.calls) == 800
    assert sorted(c.args["x"] for c in recorder.calls) == sorted([*range(200)] * 4)
