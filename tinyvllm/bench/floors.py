"""What a card can do, and what a decode step must: the floors next to measured times."""

from __future__ import annotations

import statistics

from tinyvllm.driver.device import Device, Event, Stream
from tinyvllm.driver.memory import copy_device
from tinyvllm.memory.pool import DevicePool
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.programs import step_program
from tinyvllm.ops.executor import described
from tinyvllm.ops.lower import lower
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType, ceil_div

COPY_BYTES = 2 << 30
# bf16 products of 8192^3 by cuBLAS on random values, measured on 2026-11-29: what the card can do.
MATMUL_FLOPS = {"NVIDIA H200": 780e12}


def copy_bandwidth(device: Device) -> float:
    """Bytes a second (read plus written) of a large copy on the device: the floor's rate."""
    times: list[float] = []
    with Stream() as stream, DevicePool(device, 2 * COPY_BYTES) as pool:
        src, dst = pool.alloc(COPY_BYTES, stream), pool.alloc(COPY_BYTES, stream)
        for _ in range(10):
            with Event(timing=True) as start, Event(timing=True) as end:
                start.record(stream)
                copy_device(dst, src, COPY_BYTES, stream)
                end.record(stream)
                end.synchronize()
                times.append(end.elapsed_ms(start))
        pool.free(src, stream)
        pool.free(dst, stream)
        stream.synchronize()
    return 2 * COPY_BYTES / statistics.median(times) * 1e3


def step_floor(
    model: ModelConfig, block_size: int, batch: int, context: int, copy_rate: float, flops: float
) -> tuple[int, float]:
    """(bytes, seconds) that a decode step takes at the least, from the ops' own costs.

    Each op must move its bytes (weights once, KV once) at `copy_rate` bytes a second and do its
    operations at `flops` a second, whichever takes longer.
    """
    program = lower(step_program(model, "decode", block_size=block_size, phase="decode"), "decode")
    dims = dict.fromkeys(("T", "R", "S", "D", "SLOTS", "E", "B"), batch)
    blocks = ceil_div(context, block_size)
    dims |= {"R1": batch + 1, "Q": 0, "C": context, "NB": batch * blocks, "MB": blocks}
    costs = [op_def(op.kind).cost(described(program, op, dims, DType.BF16)) for op in program.ops]
    seconds = sum(max(cost.bytes / copy_rate, cost.flops / flops) for cost in costs)
    return sum(cost.bytes for cost in costs), seconds
