"""The CPU backend gives its arrays back when it sleeps."""

import gc
import weakref

import numpy as np
import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.engine.cpu_backend import CpuBackend
from tinyvllm.model.hub import resolve_model


@pytest.fixture
def backend(golden):
    config = EngineConfig(
        model=str(golden / "llama_bias"), device="cpu", max_num_seqs=4, max_num_batched_tokens=64
    )
    return CpuBackend(config, resolve_model(config.model))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_drops_states_and_at_level_2_weights(backend, level):
    executor = backend.executor
    states = [weakref.ref(array) for array in executor._states.values()]
    weights = [weakref.ref(array) for array in executor._weights.values()]
    values = [array.copy() for array in executor._weights.values()]
    backend.sleep(level)
    gc.collect()
    assert not any(ref() is not None for ref in states)
    assert all((ref() is not None) == (level == 1) for ref in weights)
    backend.wake_up()
    assert backend.executor is not executor
    assert len(backend.executor._states) == len(states)
    for have, want in zip(backend.executor._weights.values(), values, strict=True):
        np.testing.assert_array_equal(have, want)
    backend.sleep(level)
    backend.close()
