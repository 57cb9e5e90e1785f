"""`tinyvllm bench`: what a decode step, a start and a load take, next to their floors."""

from __future__ import annotations

import json
import logging
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import numpy as np

from tinyvllm.api.llm import LLM
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import Device, Event, Stream
from tinyvllm.driver.memory import copy_device
from tinyvllm.engine.backend import open_backend
from tinyvllm.memory.pool import DevicePool
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.hub import resolve_model
from tinyvllm.model.llama import step_program
from tinyvllm.model.presets import PRESETS
from tinyvllm.ops.executor import described
from tinyvllm.ops.lower import lower
from tinyvllm.ops.registry import op_def
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import DType

COPY_BYTES = 2 << 30
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


def step_bytes(model: ModelConfig, config: EngineConfig, batch: int, context: int) -> int:
    """Bytes that a decode step must move, from the ops' own costs: weights once, KV once."""
    program = lower(step_program(model, "decode", block_size=config.block_size), "decode")
    blocks = -(-context // config.block_size)
    dims = {
        "T": batch,
        "R": batch,
        "R1": batch + 1,
        "S": batch,
        "D": batch,
        "Q": 0,
        "C": context,
        "NB": batch * blocks,
        "MB": blocks,
        "SLOTS": batch,
        "E": 1,
        "B": 1,
    }
    return sum(
        op_def(op.kind).cost(described(program, op, dims, DType.BF16)).bytes for op in program.ops
    )


def bench_latency(config: EngineConfig, batches: list[int], contexts: list[int]) -> None:
    """Median time of a decode step, end to end through the engine, for each batch and context."""
    with Device(0) as device:
        rate = copy_bandwidth(device)
        print(f"{device.info.name}: copies at {rate / 1e12:.2f} TB/s")
    print(f"{'batch':>6} {'context':>8} {'ms/step':>9} {'floor':>8} {'ratio':>6} {'tokens/s':>9}")
    steps = WARMUP_STEPS + MEASURED_STEPS
    longest = max(contexts) + steps + 1
    with LLM(**asdict(replace(config, max_model_len=longest))) as llm:
        vocab_size = llm.engine.model.config.vocab_size
        params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        for batch in batches:
            for context in contexts:
                rng = np.random.default_rng(0)
                for i in range(batch):
                    # The middle of the measured steps has the named context.
                    ids = rng.integers(0, vocab_size, context - WARMUP_STEPS - MEASURED_STEPS // 2)
                    prompt = {"prompt_token_ids": ids.tolist()}
                    llm.engine.add_request(f"{batch}.{context}.{i}", prompt, params)
                times = _decode_step_times(llm, batch)
                ms = statistics.median(times[WARMUP_STEPS:]) * 1e3
                floor = step_bytes(llm.engine.model.config, config, batch, context) / rate * 1e3
                print(
                    f"{batch:>6} {context:>8} {ms:>9.3f} {floor:>8.3f} {ms / floor:>6.2f} "
                    f"{batch / ms * 1e3:>9.0f}",
                    flush=True,
                )


def _decode_step_times(llm: LLM, batch: int) -> list[float]:
    """Seconds of each step in which all rows decode; runs until every request has finished."""
    times = []
    scheduler = llm.engine.scheduler
    while llm.engine.has_unfinished_requests():
        decoding = len(scheduler.running) == batch and all(r.decoding for r in scheduler.running)
        start = time.perf_counter()
        llm.engine.step()
        if decoding:
            times.append(time.perf_counter() - start)
    return times


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
