"""`tinyvllm bench`: what a decode step, a start and a load take, next to their floors."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from tinyvllm.api.llm import LLM
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import Device, Event, Stream, cuda_unavailable
from tinyvllm.driver.memory import copy_device
from tinyvllm.engine.backend import Backend, open_backend
from tinyvllm.engine.batch import step_limits
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.memory.budget import plan_memory
from tinyvllm.memory.pool import DevicePool
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.hub import resolve_model
from tinyvllm.model.llama import step_program
from tinyvllm.model.presets import PRESETS
from tinyvllm.ops.executor import described
from tinyvllm.ops.lower import lower
from tinyvllm.ops.numpy_executor import NumpyResult
from tinyvllm.ops.registry import op_def
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import DType, InputError, ceil_div

COPY_BYTES = 2 << 30
# bf16 products of 8192^3 by cuBLAS on random values, measured on 2026-11-29: what the card can do.
MATMUL_FLOPS = {"NVIDIA H200": 780e12}
WARMUP_STEPS = 8
MEASURED_STEPS = 48


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


@dataclass(frozen=True)
class LatencyRow:
    """A decode step at one batch and context: milliseconds, and rates at that time."""

    batch: int
    context: int
    ms: float
    floor_ms: float
    ratio: float
    tb_per_s: float  # of the bytes that the step must move
    tokens_per_s: float
    host_ms: float  # of the host's own work, the wait for the device left out


def bench_latency(
    config: EngineConfig, batches: list[int], contexts: list[int], *, as_json: bool, host: bool
) -> None:
    """Median time of a decode step, end to end through the engine, for each batch and context.

    `host` adds the host's own time in a step, which runs while the device works.
    """
    if reason := cuda_unavailable():
        raise InputError(f"bench latency needs a GPU: {reason}")
    index = int(config.device.partition(":")[2] or 0)
    with Device(index) as device:
        name, copy_rate = device.info.name, copy_bandwidth(device)
    flops = MATMUL_FLOPS.get(name, math.inf)
    rows = []
    longest = max(contexts) + MEASURED_STEPS
    with LLM(**asdict(replace(config, max_model_len=longest))) as llm:
        for batch, context in itertools.product(batches, contexts):
            seconds, host_seconds = _decode_times(llm.engine, batch, context)
            num_bytes, floor = step_floor(
                llm.engine.model.config, config.block_size, batch, context, copy_rate, flops
            )
            rows.append(
                LatencyRow(
                    batch,
                    context,
                    ms=seconds * 1e3,
                    floor_ms=floor * 1e3,
                    ratio=seconds / floor,
                    tb_per_s=num_bytes / seconds / 1e12,
                    tokens_per_s=batch / seconds,
                    host_ms=host_seconds * 1e3,
                )
            )
    if as_json:
        known_flops = flops / 1e12 if flops < math.inf else None  # JSON has no infinity
        rates = {"copy_tb_per_s": copy_rate / 1e12, "matmul_tflops": known_flops}
        print(json.dumps({"device": name, **rates, "rows": [asdict(row) for row in rows]}))
        return
    known = f"products at {flops / 1e12:.0f} TFLOP/s" if flops < math.inf else "products not known"
    print(f"{name}: copies at {copy_rate / 1e12:.2f} TB/s, {known}")
    print(
        f"{'batch':>6} {'context':>8} {'ms/step':>9} {'floor':>8} {'ratio':>6} {'TB/s':>6} "
        f"{'tokens/s':>9}" + (f" {'host ms':>8} {'us/row':>7}" if host else "")
    )
    for r in rows:
        host_columns = f" {r.host_ms:>8.3f} {r.host_ms / r.batch * 1e3:>7.2f}" if host else ""
        print(
            f"{r.batch:>6} {r.context:>8} {r.ms:>9.3f} {r.floor_ms:>8.3f} {r.ratio:>6.2f} "
            f"{r.tb_per_s:>6.2f} {r.tokens_per_s:>9.0f}{host_columns}"
        )


def _decode_times(engine: LLMEngine, batch: int, context: int) -> tuple[float, float]:
    """Median seconds of a step, and of the host's own work in it, while all rows decode.

    Runs until every request has finished. The middle of the measured steps has the context named.
    """
    params = SamplingParams(temperature=0, max_tokens=MEASURED_STEPS, ignore_eos=True)
    if batch > engine.scheduler.max_num_seqs:
        raise InputError(f"batch {batch}: at most max_num_seqs={engine.scheduler.max_num_seqs}")
    rng = np.random.default_rng(0)
    for i in range(batch):
        length = max(1, context - MEASURED_STEPS // 2)
        ids = rng.integers(0, engine.model.config.vocab_size, length).tolist()
        engine.add_request(f"{batch}.{context}.{i}", {"prompt_token_ids": ids}, params)
    times, host = [], []
    running = engine.scheduler.running
    executor = engine.backend.executor
    while engine.has_unfinished_requests():
        decoding = len(running) == batch and all(r.decoding for r in running)
        waited, start = getattr(executor, "waited", 0.0), time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        if decoding:
            times.append(seconds)
            host.append(seconds - (getattr(executor, "waited", 0.0) - waited))
    steady = slice(WARMUP_STEPS, -WARMUP_STEPS)
    return statistics.median(times[steady]), statistics.median(host[steady])


def bench_host(config: EngineConfig, batches: list[int]) -> None:
    """Python's time for a decode step: the engine on a device that does nothing, at once."""
    for batch in batches:
        engine = LLMEngine(config, backend=null_backend(config, batch))
        seconds, _ = _decode_times(engine, batch, 256)
        print(f"batch {batch}: {seconds * 1e3:.3f} ms a step, {seconds / batch * 1e6:.2f} us a row")


class NullExecutor:
    """A device that samples token 0 everywhere, in no time."""

    def run(
        self,
        program: str,
        dims: Mapping[str, int],
        inputs: Mapping[str, np.ndarray],
        fetch: tuple[str, ...],
        graph: bool = False,
    ) -> NumpyResult:
        """Zeros for the outputs; see `Executor.run`."""
        return NumpyResult({name: np.zeros(dims["S"], np.int32) for name in fetch})

    def write_row(self, name: str, row: int, values: np.ndarray) -> None:
        """Nothing: there is no state."""

    def close(self) -> None:
        """Nothing to free."""


def null_backend(config: EngineConfig, batch: int) -> Backend:
    """A backend for `batch` sequences of up to 1024 tokens on the device that does nothing."""
    executor = NullExecutor()
    limits = step_limits(batch, config.max_num_batched_tokens, 1024, config.block_size)
    memory = plan_memory(
        free_bytes=1 << 30,
        gpu_memory_utilization=1.0,
        release_threshold=1.0,
        weights_bytes=0,
        arena_bytes=0,
        state_bytes=0,
        temporary_bytes=0,
        block_bytes=1,
        override=batch * 1024 // config.block_size,
    )
    return Backend(executor, "nothing", True, 1024, limits, memory, executor.close)


def bench_startup(config: EngineConfig, runs: int) -> None:
    """Seconds from the start of a process to its first token: first with an empty kernel cache."""
    command = [
        sys.executable,
        "-m",
        "tinyvllm",
        "generate",
        "Hello",
        "--model",
        config.model,
        "--load-format",
        config.load_format,
        "--max-tokens",
        "2",
        "--ignore-eos",
    ]
    with tempfile.TemporaryDirectory() as cache:
        for run in range(runs + 1):
            start = time.perf_counter()
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "TINYVLLM_CACHE_DIR": cache},
            ) as process:
                assert process.stdout is not None and process.stderr is not None
                first = process.stdout.read(1)
                seconds = time.perf_counter() - start
                if not first:
                    raise RuntimeError(process.stderr.read().decode())
            state = "empty" if run == 0 else "warm"
            print(f"{state} kernel cache: first token after {seconds:.2f} s", flush=True)


def bench_load(config: EngineConfig) -> None:
    """Writes safetensors of the preset's shape to a temporary directory and loads them twice."""
    if config.model not in PRESETS:
        raise InputError(f"model={config.model!r}: must be one of {', '.join(PRESETS)}")
    logging.getLogger().setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(PRESETS[config.model], Path(directory))
        for _ in range(2):
            model = resolve_model(directory, "safetensors")
            open_backend(replace(config, model=directory), model).close()


def write_checkpoint(model: ModelConfig, directory: Path) -> None:
    """A safetensors file and config.json of this shape, with arbitrary small bf16 values."""
    config = {
        "architectures": [model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "head_dim": model.head_dim,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": model.tie_word_embeddings,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, weight in step_program(model, "shapes", block_size=16).weights.items():
        size = prod(weight.shape) * 2
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    # bf16 bits from 0x3c00 to 0x3cff: values from 0.0078 to 0.031.
    piece = (np.random.default_rng(0).integers(0, 256, 1 << 23, np.uint16) | 0x3C00).tobytes()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while end > 0:
            end -= file.write(piece[: min(end, len(piece))])
