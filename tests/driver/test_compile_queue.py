"""The order in which kernels are compiled, errors, and the end: with a compiler that is held up."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinyvllm.driver import compile_queue
from tinyvllm.driver.calls import CompileError
from tinyvllm.driver.compile_queue import CompileQueue
from tinyvllm.driver.spec import Kernel

SPECS = [Kernel("k.cu", "k", "i32 n")(n) for n in range(8)]
BROKEN = Kernel("k.cu", "broken", "i32 n")()


class Compiler:
    """Says which kernels it was asked for; each waits for its permission."""

    def __init__(self):
        self.begun, self.permitted = [], threading.Semaphore(0)

    def __call__(self, spec, arch, cache):
        self.begun.append(spec)
        assert self.permitted.acquire(timeout=10)
        if spec is BROKEN:
            raise CompileError(spec.name, "oops")
        return spec.name, arch

    def permit(self, count):
        self.permitted.release(count)


def until(condition):
    """Waits for other threads."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def compiler(monkeypatch):
    fake = Compiler()
    monkeypatch.setattr(compile_queue, "compile_spec", fake)
    return fake


@pytest.fixture
def queue(compiler):
    with CompileQueue("sm_90a", None, jobs=1) as opened:
        yield opened
        compiler.permit(100)


def test_what_is_waited_for_goes_first(queue, compiler):
    for spec in SPECS:
        queue.put(spec)
    until(lambda: compiler.begun)
    with ThreadPoolExecutor(1) as other:
        wanted = [SPECS[5], SPECS[3]]
        got = other.submit(queue.get, wanted)
        until(lambda: SPECS[5] is next(iter(queue._waiting)))
        compiler.permit(3)
        assert got.result(timeout=10) == {spec: (spec.name, "sm_90a") for spec in wanted}
    assert queue.pending() == [spec for spec in SPECS if spec not in wanted]
    assert all((spec in queue) == (spec not in wanted) for spec in SPECS)
    compiler.permit(5)
    queue.get(queue.pending())
    assert compiler.begun == [SPECS[i] for i in (0, 5, 3, 1, 2, 4, 6, 7)]


def test_an_error_is_logged_and_raised_for_each_who_asks(queue, compiler, caplog):
    queue.put(BROKEN)
    queue.put(SPECS[0])
    compiler.permit(2)
    queue.get([SPECS[0]])
    for _ in range(2):
        with pytest.raises(CompileError, match="oops"):
            queue.get([BROKEN])
    assert [r.getMessage() for r in caplog.records] == [
        "broken could not be compiled; steps that need it will fail"
    ]


def test_closing_waits_for_what_has_begun_and_drops_the_rest(compiler):
    queue = CompileQueue("sm_90a", None, jobs=2)
    for spec in SPECS:
        queue.put(spec)
    until(lambda: len(compiler.begun) == 2)
    with ThreadPoolExecutor(1) as other:
        closing = other.submit(queue.close)
        until(lambda: not queue._waiting)
        assert not closing.done()
        compiler.permit(2)
        closing.result(timeout=10)
    assert compiler.begun == SPECS[:2]
    queue.close()


LEFT_OPEN = """
import threading, time
from tinyvllm.driver import compile_queue
from tinyvllm.driver.spec import Kernel

begun = threading.Event()

def compiled(spec, arch, cache):
    print(spec.name, flush=True)
    begun.set()
    threading.main_thread().join()

compile_queue.compile_spec = compiled
specs = [Kernel("k.cu", "k", "i32 n")(n) for n in range(40)]
queue = compile_queue.CompileQueue("sm_90a", None, jobs=1)
for spec in specs:
    queue.put(spec)
begun.wait()
if {waits}:
    threading.Thread(target=lambda: print(len(queue.get([specs[7], specs[39]])))).start()
    while not queue._waiting.get(specs[39]):
        time.sleep(0.001)
"""


@pytest.mark.parametrize("waits", [False, True])
def test_a_program_that_leaves_it_open_ends_when_what_is_waited_for_is_compiled(waits):
    program = LEFT_OPEN.format(waits=waits)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.stderr == ""
    assert run.stdout.splitlines() == (["k<0>", "k<7>", "k<39>", "2"] if waits else ["k<0>"])
