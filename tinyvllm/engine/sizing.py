"""How an engine is sized: its programs, the memory plan and the longest sequence."""

from __future__ import annotations

import os
from math import prod

from tinyvllm.config import EngineConfig
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.engine.batch import step_limits
from tinyvllm.memory.budget import MemoryPlan, plan_memory
from tinyvllm.memory.plan import ALIGNMENT
from tinyvllm.memory.swap_space import SwapSpace
from tinyvllm.model.config import ModelConfig
from tinyvllm.model.programs import (
    edits_program,
    logprobs_program,
    score_program,
    step_program,
)
from tinyvllm.model.weights import packed_weights, place_weights
from tinyvllm.ops.executor import InputLayout, follows, plan_program
from tinyvllm.ops.lower import lower
from tinyvllm.ops.program import INPUT, STATE, Program, concrete
from tinyvllm.sampling_params import SAMPLERS
from tinyvllm.util import DType, InputError, align_up, ceil_div, format_bytes, logger

# Tokens that the KV cache must hold at the least where max_model_len was not asked for.
MIN_TOKENS = 2048


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
    limits = engine_limits(config, max_model_len, num_blocks=1)
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
        override=config.num_gpu_blocks_override,
    )
    fitting = plan.num_blocks * config.block_size
    if fitting < max_model_len:
        if config.max_model_len:  # only an override gives fewer blocks than were asked for
            raise InputError(
                f"num_gpu_blocks_override={plan.num_blocks}: a sequence of max_model_len="
                f"{max_model_len} tokens needs {ceil_div(needed, config.block_size)} KV blocks"
            )
        logger.info(
            "max_model_len is %d, all that the KV cache holds; the model's is %d",
            fitting,
            max_model_len,
        )
        max_model_len = fitting
    return plan, max_model_len


def engine_limits(config: EngineConfig, max_model_len: int, num_blocks: int) -> dict[str, int]:
    """The largest sizes of a run, with so many KV blocks."""
    limits = step_limits(
        config.max_num_seqs, config.max_num_batched_tokens, max_model_len, config.block_size
    )
    return {**limits, "NB": num_blocks}


def swap_space(config: EngineConfig, block_bytes: int) -> SwapSpace | None:
    """The swap space that the options ask for; None without room for a block, or without use."""
    wanted = int(config.swap_space * (1 << 30))
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > host:
        logger.warning(
            "swap_space=%s: the host has %s; the swap space gets no more than that",
            config.swap_space,
            format_bytes(host),
        )
    num_blocks = min(wanted, host) // block_bytes
    if num_blocks == 0 or config.preemption_mode == "recompute":
        return None
    return SwapSpace(num_blocks, block_bytes)
