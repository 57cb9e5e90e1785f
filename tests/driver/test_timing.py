"""Device times of single launches."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from tinyvllm.driver import calls
from tinyvllm.driver.device import Stream
from tinyvllm.driver.kernel import KernelLoader
from tinyvllm.driver.memory import MemPool, memset
from tinyvllm.driver.spec import Kernel
from tinyvllm.driver.timing import CHUNK, LaunchTimer
from tinyvllm.util import ceil_div


class HeldStream:
    """Functions for a driver whose stream takes work while it is held back, and no longer."""

    def __init__(self):
        self.memory = ctypes.create_string_buffer(4)
        self.address = ctypes.addressof(self.memory)
        self.clock, self.times, self.waits, self.events = 0.0, {}, [], 0

    def flag(self):
        return ctypes.c_uint32.from_address(self.address).value

    def functions(self):
        def create(flags):
            self.events += 1
            return 0, self.events

        def wait(stream, address, value, flags):
            assert (address, value, self.flag()) == (self.address, 1, 0)
            self.waits.append(stream)
            return (0,)

        def record(event, stream):
            assert self.flag() == 0, "recorded while the stream ran"
            self.times[event] = self.clock
            return (0,)

        def synchronize(stream):
            assert self.flag() == 1, "this would never end"
            return (0,)

        return {
            "cuMemHostAlloc": lambda size, flags: (0, self.address),
            "cuMemFreeHost": lambda address: (0,),
            "cuEventCreate": create,
            "cuEventDestroy": lambda event: (0,),
            "cuEventRecord": record,
            "cuEventElapsedTime": lambda a, b: (0, 1e3 * (self.times[b] - self.times[a])),
            "cuStreamCreate": lambda flags: (0, 9),
            "cuStreamDestroy": lambda stream: (0,),
            "cuStreamWaitValue32": wait,
            "cuStreamSynchronize": synchronize,
        }

    def launch(self, seconds):
        def run(stream):
            if seconds < 0:
                raise RuntimeError("refused")
            self.clock += seconds

        def load():
            assert self.flag() == 1 or not self.waits, "loading may wait for the device"

        return SimpleNamespace(run=run, load=load)


@pytest.fixture
def held(monkeypatch):
    held = HeldStream()
    monkeypatch.setattr(calls, "_functions", calls._Functions(held.functions()))
    return held


@pytest.mark.parametrize("count", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_each_launch_gets_its_own_time(held, count):
    wanted = [1 + n % 7 for n in range(count)]
    with Stream() as stream, LaunchTimer() as timer:
        found = timer.seconds([held.launch(s) for s in wanted], stream)
    assert found == pytest.approx(wanted)
    assert len(held.waits) == ceil_div(count, CHUNK), "the stream is never held for many launches"


def test_after_an_error_the_stream_goes_on(held):
    with Stream() as stream, LaunchTimer() as timer:
        with pytest.raises(RuntimeError, match="refused"):
            timer.seconds([held.launch(1), held.launch(-1)], stream)
        assert held.flag() == 1
        stream.synchronize()


SPIN = """
// Takes about `n` clock ticks.
__global__ void spin(unsigned* out, unsigned n) {
  const long long end = clock64() + n;
  while (clock64() < end) {}
  *out = n;
}
"""


@pytest.mark.gpu(alone=True)
def test_times_on_the_device(device, stream, tmp_path):
    (tmp_path / "spin.cu").write_text(SPIN)
    spin = Kernel(str(tmp_path / "spin.cu"), "spin", "ptr out, u32 n")()
    with (
        KernelLoader(device) as loader,
        MemPool(device, 0, max_bytes=32 << 20) as pool,
        LaunchTimer() as timer,
    ):
        out = pool.alloc(4, stream)
        memset(out, 0, 4, stream)
        sizes = [1000, 200_000, 1000, 1000] * 20  # more than a chunk
        launches = [loader.prepare(spin.launch((1,), 1, out=out, n=n)) for n in sizes]
        timer.seconds(launches, stream)
        whole, kernels = timer.run("spins", {"T": 1}, launches, loader, stream)
        pool.free(out, stream)
        stream.synchronize()
    times = np.array([k.seconds for k in kernels]).reshape(-1, 4)
    assert whole.name == "spins" and whole.seconds == pytest.approx(times.sum())
    assert kernels[0].name == "spin" and kernels[0].args["block"] == 1
    short = np.median(times[:, [0, 2, 3]])
    assert short < 10e-6, "the host's time for a launch must not be in it"
    assert np.median(times[:, 1]) > 5 * short
