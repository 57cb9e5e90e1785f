"""The floors that benchmarks print."""

import pytest

from tinyvllm.bench.floors import step_floor
from tinyvllm.model.presets import PRESETS

MODEL = PRESETS["llama-3.2-1b"]


def test_floor_of_a_small_batch_is_the_weights_and_the_kv_cache():
    num_bytes, seconds = step_floor(MODEL, 16, 1, 4096, 4e12, 800e12)
    weights, kv = 2.4715e9, 4096 * 32768
    assert num_bytes == pytest.approx(weights + kv, rel=0.003)
    assert seconds == pytest.approx(num_bytes / 4e12, rel=1e-3)


def test_floor_of_a_large_batch_is_the_products_and_the_kv_cache():
    _, seconds = step_floor(MODEL, 16, 256, 256, 4.25e12, 780e12)
    products, kv = 256 * 2.47e9 / 780e12, 256 * 256 * 32768 / 4.25e12
    assert seconds == pytest.approx(products + kv, rel=0.1)
