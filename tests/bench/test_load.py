"""What `bench load` refuses."""

import pytest

from tinyvllm.bench.load import bench_load
from tinyvllm.config import EngineConfig
from tinyvllm.util import InputError


def test_load_measures_presets_only():
    with pytest.raises(InputError, match=r"must be one of llama-3\.2-1b"):
        bench_load(EngineConfig(model="other"))
