"""Builds the executor for a device: programs, memory plan, weights, states."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import Device, Stream, cuda_unavailable
from tinyvllm.driver.kernel import KernelLoader
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.engine.batch import step_limits
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.budget import MemoryPlan, plan_memory
from tinyvllm.memory.plan import ALIGNMENT
from tinyvllm.memory.pool import DevicePool
from tinyvllm.memory.upload import CopyJob, Uploader
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.hub import LocalModel
from tinyvllm.model.llama import (
    edits_program,
    logprobs_program,
    score_program,
    step_program,
)
from tinyvllm.model.presets import DummySource
from tinyvllm.model.weights import (
    check_weights,
    copy_jobs,
    dummy_launches,
    load_numpy,
    packed_weights,
    place_weights,
)
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.ops.executor import Executor, InputLayout, follows, plan_program
from tinyvllm.ops.lower import lower
from tinyvllm.ops.numpy_executor import NumpyExecutor
from tinyvllm.ops.program import INPUT, STATE, Program, concrete
from tinyvllm.progress import Progress
from tinyvllm.sampling_params import SAMPLERS
from tinyvllm.util import DType, InputError, align_up, ceil_div, format_bytes, logger

# Tokens that the KV cache must hold at the least where max_model_len was not asked for.
MIN_TOKENS = 2048


@dataclass
class Backend:
    """An executor with what the engine must know of it; `close` frees everything."""

    executor: Executor
    device_name: str
    asynchronous: bool  # runs go on while the host does something else
    max_model_len: int
    limits: Mapping[str, int]  # largest sizes of a run
    memory: MemoryPlan
    close: Callable[[], None]
    enter: Callable[[], None] = lambda: None  # comes before work that a thread gives the device


def open_backend(config: EngineConfig, model: LocalModel) -> Backend:
    """Loads the model onto the device that the configuration asks for.

    "auto" is the first GPU, or the CPU where CUDA cannot be used (said in one log line). Raises
    InputError for a device that is asked for and not there, and for a model that does not fit.
    """
    if config.device == "cpu":
        return _open_cpu(config, model)
    reason = cuda_unavailable()
    if reason is None:
        return _open_cuda(config, model)
    if config.device != "auto":
        raise InputError(f"device={config.device!r}: {reason}")
    logger.info("%s Running on the CPU.", reason)
    return _open_cpu(config, model)


def model_dtype(config: EngineConfig, model: ModelConfig) -> DType:
    """The type of weights and activations: the one asked for, else the checkpoint's 16-bit one."""
    if config.dtype != "auto":
        return DType(config.dtype)
    return DType.FP16 if model.dtype is DType.FP16 else DType.BF16


def engine_programs(config: EngineConfig, model: ModelConfig, primitive: bool) -> list[Program]:
    """The programs of an engine: steps by phase and sampler, edits alone, two kinds of scoring.

    `primitive`: the steps as the model emits them; else lowered for the CUDA kernels.
    """
    programs = []
    for sampler in SAMPLERS:
        for phase in ("prefill", "decode"):
            program = step_program(
                model,
                f"{phase}.{sampler}",
                block_size=config.block_size,
                phase=phase,
                sampler=sampler,
            )
            programs.append(program if primitive else lower(program, phase))
    edits = edits_program("edits")
    return [*programs, edits, logprobs_program(model, "logprobs"), score_program(model, "score")]


def plan_engine(
    config: EngineConfig,
    model: ModelConfig,
    programs: list[Program],
    *,
    free_bytes: int,
    act: DType,
    device: DeviceInfo | None,
) -> tuple[MemoryPlan, int]:
    """The memory plan and the longest sequence: max_model_len if given, else what fits.

    A pure function of its arguments; `act` is the element type of weights, activations and KV
    (float32 on the CPU). Raises InputError when the model does not fit.
    """
    max_model_len = config.max_model_len or model.max_context
    model.check_max_model_len(max_model_len)
    limits = _limits(config, max_model_len, num_blocks=1)
    sizes = {p.name: plan_program(p, limits, act, device).arena_bytes for p in programs}
    buffers = {b.name: b for p in programs for b in p.of_kind(STATE, INPUT)}
    kv = buffers.pop("kv_cache")
    inputs = [b for b in buffers.values() if b.kind == INPUT]
    state = InputLayout.of(inputs, limits).num_bytes + sum(
        align_up(prod(concrete(b.shape, limits)) * (b.dtype or act).itemsize, ALIGNMENT)
        for b in buffers.values()
        if b.kind == STATE
    )
    needed = max_model_len if config.max_model_len else min(max_model_len, MIN_TOKENS)
    plan = plan_memory(
        free_bytes=free_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        release_threshold=config.release_threshold,
        weights_bytes=place_weights(packed_weights(programs), act)[1],
        arena_bytes=max(sizes[p.name] for p in programs if not follows(p)),
        state_bytes=state,
        temporary_bytes=max(sizes[p.name] for p in programs if follows(p)),
        block_bytes=prod(concrete(kv.shape, limits)) * act.itemsize,
        min_blocks=ceil_div(needed, config.block_size),
        max_blocks_useful=config.max_num_seqs * limits["MB"],
    )
    fitting = plan.num_blocks * config.block_size
    if fitting < max_model_len:
        logger.info(
            "max_model_len is %d, all that the KV cache holds; the model's is %d",
            fitting,
            max_model_len,
        )
        max_model_len = fitting
    return plan, max_model_len


def _limits(config: EngineConfig, max_model_len: int, num_blocks: int) -> dict[str, int]:
    limits = step_limits(
        config.max_num_seqs, config.max_num_batched_tokens, max_model_len, config.block_size
    )
    return {**limits, "NB": num_blocks}


def _open_cpu(config: EngineConfig, model: LocalModel) -> Backend:
    programs = engine_programs(config, model.config, primitive=True)
    memory, max_model_len = plan_engine(
        config, model.config, programs, free_bytes=_host_memory(), act=DType.F32, device=None
    )
    limits = _limits(config, max_model_len, memory.num_blocks)
    source = model.open_source()
    try:
        check_weights(source, programs[0], model.where)
        weights = load_numpy(source, programs[0], model_dtype(config, model.config))
    finally:
        source.close()
    states = {
        b.name: np.zeros(concrete(b.shape, limits), b.dtype.storage if b.dtype else np.float32)
        for p in programs
        for b in p.of_kind(STATE)
    }
    executor = NumpyExecutor(programs, weights, states, limits)
    return Backend(executor, "cpu", False, max_model_len, limits, memory, executor.close)


def _host_memory() -> int:
    """Bytes of memory that the host can give without swapping; half of all where it won't say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _open_cuda(config: EngineConfig, model: LocalModel) -> Backend:
    act = model_dtype(config, model.config)
    programs = engine_programs(config, model.config, primitive=False)
    index = int(config.device.partition(":")[2] or 0)
    with ExitStack() as stack:
        device = stack.enter_context(Device(index, config.kernel_path))
        memory, max_model_len = plan_engine(
            config,
            model.config,
            programs,
            free_bytes=device.mem_info()[0],
            act=act,
            device=device.info,
        )
        limits = _limits(config, max_model_len, memory.num_blocks)
        stream = stack.enter_context(Stream())
        pool = stack.enter_context(DevicePool(device, memory.budget, config.release_threshold))
        loader = stack.enter_context(KernelLoader(device))
        weights = _load_cuda(config, model, programs, act, pool, loader, stream)
        executor = CudaExecutor(
            programs,
            weights,
            limits,
            act=act,
            info=device.info,
            pool=pool,
            loader=loader,
            stream=stream,
        )
        stack.callback(executor.close)
        name = f"cuda:{index} ({device.info.name})"
        close, enter = stack.pop_all().close, device.make_current
        return Backend(executor, name, True, max_model_len, limits, memory, close, enter)


def _load_cuda(
    config: EngineConfig,
    model: LocalModel,
    programs: list[Program],
    act: DType,
    pool: DevicePool,
    loader: KernelLoader,
    stream: Stream,
) -> dict[str, DeviceArray]:
    """All weights in one allocation of the pool, which lives as long as the pool."""
    packed = packed_weights(programs)
    _, num_bytes = place_weights(packed, act)
    arrays, _ = place_weights(packed, act, pool.alloc(num_bytes, stream))
    source = model.open_source()
    try:
        check_weights(
            source, step_program(model.config, "check", block_size=config.block_size), model.where
        )
        if isinstance(source, DummySource):
            for launch in dummy_launches(source, packed, arrays):
                loader.prepare(launch).run(stream)
            stream.synchronize()
            return arrays
        # The copies run in a stream of their own; the weights are used once they are done.
        stream.synchronize()
        with (
            Stream() as copies,
            Uploader(copies) as uploader,
            Progress(num_bytes, "Loading weights", "B") as bar,
        ):
            done = uploader.upload(_counted(copy_jobs(source, packed, arrays), bar))
        logger.info(
            "weights: %s in %.2f s (%.1f GB/s)",
            format_bytes(done.num_bytes),
            done.seconds,
            done.num_bytes / done.seconds / 1e9,
        )
    finally:
        source.close()
    return arrays


def _counted(jobs: Iterable[CopyJob], bar: Progress) -> Iterator[CopyJob]:
    """The jobs, each counted as it is begun."""
    for job in jobs:
        yield job
        bar.update(job.num_bytes)
