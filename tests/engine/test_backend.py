"""Where a model's backend is opened: which one, and without garbage collections meanwhile."""

import gc
from types import SimpleNamespace

import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import CudaUnavailableError
from tinyvllm.engine import backend, cpu_backend, cuda_backend
from tinyvllm.engine.backend import open_backend
from tinyvllm.util import InputError


@pytest.fixture
def opened(monkeypatch):
    """What was opened, and whether garbage was collected then; `error` is raised for a GPU."""
    seen = SimpleNamespace(device=None, collecting=None, error=None)

    def on_gpu(config, model, index):
        seen.device, seen.collecting = index, gc.isenabled()
        if seen.error:
            raise seen.error

    monkeypatch.setattr(backend, "check_driver", lambda: None)
    monkeypatch.setattr(cuda_backend, "CudaBackend", on_gpu)
    monkeypatch.setattr(cpu_backend, "CpuBackend", lambda *args: setattr(seen, "device", "cpu"))
    return seen


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda:2", 2), ("cpu", "cpu")])
def test_the_device_that_is_asked_for_is_opened(opened, device, index):
    open_backend(EngineConfig(device=device), None)
    assert opened.device == index and opened.collecting is (None if index == "cpu" else False)
    assert gc.isenabled()


def test_without_cuda_auto_is_the_cpu_and_cuda_an_error(opened):
    opened.error = CudaUnavailableError("There is none.")
    with pytest.raises(InputError, match=r"device='cuda': There is none\."):
        open_backend(EngineConfig(device="cuda"), None)
    assert gc.isenabled()
    open_backend(EngineConfig(device="auto"), None)
    assert opened.device == "cpu"
