"""What a card can do, and what a decode step must: the floors next to measured times."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from tinyvllm.config import EngineConfig
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


@dataclass(frozen=True)
class Rates:
    """What the card can do: bytes a second copied (read plus written), operations a second."""

    copy: float
    flops: float

    def floor(self, num_bytes: int, flops: int) -> float:
        """Seconds that so much work takes at the least."""
        return max(num_bytes / self.copy, flops / self.flops)

    def figures(self) -> dict[str, float | None]:
        """Both as benchmarks print them in JSON, which has no infinity."""
        flops = self.flops / 1e12 if self.flops < math.inf else None
        return {"copy_tb_per_s": self.copy / 1e12, "matmul_tflops": flops}


def device_rates(config: EngineConfig) -> tuple[str, Rates]:
    """Name and rates of the GPU that the configuration asks for."""
    with Device(config.gpu_index or 0) as device:
        flops = MATMUL_FLOPS.get(device.info.name, math.inf)
        return device.info.name, Rates(copy_bandwidth(device), flops)


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
    model: ModelConfig, block_size: int, batch: int, context: int, rates: Rates
) -> tuple[int, float]:
    """(bytes, seconds) that a decode step takes at the least, from the ops' own costs.

    Each op must move its bytes (weights once, KV once) and do its operations.
    """
    program = lower(step_program(model, "decode", block_size=block_size, phase="decode"), "decode")
    dims = dict.fromkeys(("T", "R", "S", "D", "SLOTS", "E", "B"), batch)
    blocks = ceil_div(context, block_size)
    dims |= {"R1": batch + 1, "Q": 0, "C": context, "NB": batch * blocks, "MB": blocks}
    costs = [op_def(op.kind).cost(described(program, op, dims, DType.BF16)) for op in program.ops]
    seconds = sum(rates.floor(cost.bytes, cost.flops) for cost in costs)
    return sum(cost.bytes for cost in costs), seconds
