"""The floors that benchmarks print, and Python's time on a device that does nothing."""

import pytest

from tinyvllm import bench
from tinyvllm.config import EngineConfig
from tinyvllm.model.presets import PRESETS
from tinyvllm.util import InputError

MODEL = PRESETS["llama-3.2-1b"]
DUMMY = EngineConfig(model="llama-3.2-1b", load_format="dummy")


def test_floor_of_a_small_batch_is_the_weights_and_the_kv_cache():
    num_bytes, seconds = bench.step_floor(MODEL, 16, 1, 4096, 4e12, 800e12)
    weights, kv = 2.4715e9, 4096 * 32768
    assert num_bytes == pytest.approx(weights + kv, rel=0.003)
    assert seconds == pytest.approx(num_bytes / 4e12, rel=1e-3)


def test_floor_of_a_large_batch_is_the_products_and_the_kv_cache():
    _, seconds = bench.step_floor(MODEL, 16, 256, 256, 4.25e12, 780e12)
    products, kv = 256 * 2.47e9 / 780e12, 256 * 256 * 32768 / 4.25e12
    assert seconds == pytest.approx(products + kv, rel=0.1)


def test_host_prints_a_line_for_each_batch(capsys):
    bench.bench_host(DUMMY, [1, 4])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 1", "batch 4"]


def test_load_measures_presets_only():
    with pytest.raises(InputError, match=r"must be one of llama-3\.2-1b"):
        bench.bench_load(EngineConfig(model="other"))
