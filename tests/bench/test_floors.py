"""The floors that benchmarks print."""

import math

import pytest

from tinyvllm.bench.floors import Rates, step_floor
from tinyvllm.model.presets import PRESETS

MODEL = PRESETS["llama-3.2-1b"]


def test_floor_is_the_larger_of_moving_and_computing():
    rates = Rates(copy=4e12, flops=8e14)
    assert rates.floor(4_000_000, 0) == pytest.approx(1e-6)
    assert rates.floor(4_000_000, 1_600_000_000) == pytest.approx(2e-6)
    assert Rates(4e12, math.inf).floor(4_000_000, 10**15) == pytest.approx(1e-6)


def test_floor_of_a_small_batch_is_the_weights_and_the_kv_cache():
    num_bytes, seconds = step_floor(MODEL, 16, 1, 4096, Rates(4e12, 800e12))
    weights, kv = 2.4715e9, 4096 * 32768
    assert num_bytes == pytest.approx(weights + kv, rel=0.003)
    assert seconds == pytest.approx(num_bytes / 4e12, rel=1e-3)


def test_floor_of_a_large_batch_is_the_products_and_the_kv_cache():
    _, seconds = step_floor(MODEL, 16, 256, 256, Rates(4.25e12, 780e12))
    products, kv = 256 * 2.47e9 / 780e12, 256 * 256 * 32768 / 4.25e12
    assert seconds == pytest.approx(products + kv, rel=0.1)
