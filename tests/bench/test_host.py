"""Python's time on a device that does nothing."""

from tinyvllm.bench.host import bench_host
from tinyvllm.config import EngineConfig


def test_host_prints_a_line_for_each_batch(capsys):
    bench_host(EngineConfig(model="llama-3.2-1b", load_format="dummy"), [1, 4])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 1", "batch 4"]
