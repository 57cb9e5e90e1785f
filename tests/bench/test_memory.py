"""`bench memory` on the CPU, where its own swapper stands in, and what it prints."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tinyvllm.bench import memory
from tinyvllm.cli.main import main
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.util import InputError

ROW = memory.SwapRow(
    block_size=16,
    block_bytes=512 << 10,
    out_idle=54e9,
    in_idle=53e9,
    out_decoding=50e9,
    in_decoding=49e9,
    step_ms=1.25,
    step_out_ms=1.375,
    step_in_ms=1.5,
    stall_ms=32.0,
    slab_bytes=64 << 20,
)


@pytest.fixture
def config(golden):
    return EngineConfig(
        model=str(golden / "llama_bias"),
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        swap_space=0.01,
        preemption_mode="swap",
    )


def test_swapping_beside_a_decode(config):
    engine = LLMEngine(config)
    row = memory.measure_swapping(engine, 2, 32)
    assert engine.stats().num_preemptions_swap == 0
    assert row.block_bytes == engine.backend.memory.block_bytes
    assert min(row.out_idle, row.in_idle, row.out_decoding, row.in_decoding) > 0
    assert min(row.step_ms, row.step_out_ms, row.step_in_ms) > 0
    stats = engine.backend.swapper.stats
    assert stats.bytes_out and stats.bytes_in
    assert engine.scheduler.blocks.num_used == 0 and engine.backend.swapper.space.num_used == 0
    engine.scheduler.check_integrity()
    engine.close()


def test_without_swap_space(config):
    engine = LLMEngine(replace(config, swap_space=0, preemption_mode="auto"))
    with pytest.raises(InputError, match="swap_space=0"):
        memory.measure_swapping(engine, 2, 32)
    engine.close()


def test_sequences_that_leave_no_blocks(config):
    engine = LLMEngine(config)
    with pytest.raises(InputError, match=r"batch 6, context 32: 30 of \d+ KV blocks"):
        memory.measure_swapping(engine, 6, 32)
    engine.close()


def test_what_is_printed(config, monkeypatch, capsys):
    """On a GPU that is not there: only what is printed from the measured values."""
    device = SimpleNamespace(info=SimpleNamespace(name="a card"))
    llm = SimpleNamespace(engine=None)
    monkeypatch.setattr(memory, "cuda_unavailable", lambda: None)
    monkeypatch.setattr(memory, "Device", lambda index: nullcontext(device))
    monkeypatch.setattr(memory, "Stream", nullcontext)
    times = memory.AllocationTimes(1.5, 1.2, 69.0)
    monkeypatch.setattr(memory, "allocation_times", lambda device, stream: times)
    monkeypatch.setattr(memory, "plain_rates", lambda device, stream: (55e9, 54e9))
    monkeypatch.setattr(memory, "LLM", lambda **_: nullcontext(llm))
    monkeypatch.setattr(memory, "measure_swapping", lambda engine, batch, context: ROW)
    memory.bench_memory(config, [16], 4, 256, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "1.50 us by the pool (the bare bindings 1.20), 69.0 us by cuMemAlloc" in lines[0]
    assert "55.0 GB/s out, 54.0 GB/s in" in lines[1]
    assert lines[-1].split() == [
        "16", "512", "98.2%", "98.1%", "90.9%", "90.7%", "1.250", "1.375", "1.500", "32.0",
    ]  # fmt: skip
    memory.bench_memory(config, [16, 32], 4, 256, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["pool_us"] == 1.5 and found["plain_out"] == 55e9 and len(found["rows"]) == 2


@pytest.mark.skipif(cuda_unavailable() is None, reason="needs a machine without a GPU")
def test_a_gpu_is_needed(capsys):
    assert main(["bench", "memory", "--block-sizes", "16", "--batch", "8", "--context", "64"]) == 1
    assert "bench memory needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu(alone=True)
def test_allocations_and_copies_on_the_device(device, stream):
    times = memory.allocation_times(device, stream, 100)
    assert 0.1 < times.binding_us < times.pool_us < times.driver_us
    assert min(memory.plain_rates(device, stream)) > 1e9
