"""Python's time on a device that does nothing."""

import pytest

from tinyvllm.bench.host import bench_host
from tinyvllm.config import EngineConfig
from tinyvllm.util import InputError


def test_host_prints_a_line_for_each_batch(capsys):
    bench_host(EngineConfig(model="llama-3.2-1b", load_format="dummy"), [1, 4])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 1", "batch 4"]


@pytest.mark.parametrize("batch", [0, -3, 513])
def test_batches_that_no_step_has_are_refused(batch):
    with pytest.raises(InputError, match=f"batch={batch}: must be from 1 to 512"):
        bench_host(EngineConfig(model="llama-3.2-1b", load_format="dummy"), [batch])
