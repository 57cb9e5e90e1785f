"""The engine's options, in one frozen dataclass, and how options are declared and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from tinyvllm.util import InputError

BLOCK_SIZES = (8, 16, 32, 64)
DTYPES = ("auto", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest")
KERNEL_PATHS = ("auto", "portable")
PREEMPTION_MODES = ("auto", "swap", "recompute")

RETURN_MARGIN = 0.05  # how far below preemption_threshold a preempted sequence stays on its return


def option(
    default: Any, help: str, choices: tuple[Any, ...] | None = None, *, cli: bool = True
) -> Any:
    """A dataclass field with the help text and choices that the command line shows.

    `cli` False: the command line has no such option, and leaves the default.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "cli": cli})


@dataclass(frozen=True)
class EngineConfig:
    """Every option of the engine, with vLLM's names where vLLM has the option.

    Raises InputError, naming the option, the value and the limit, for a value out of range.
    """

    model: str = option("", "directory, GGUF file, hub name or preset")
    revision: str | None = option(None, "branch, tag or commit of the model on the hub")
    dtype: str = option(
        "auto", "type of weights, activations and KV cache; auto: the model's", DTYPES
    )
    max_model_len: int | None = option(None, "longest prompt + output in tokens (default: model's)")
    gpu_memory_utilization: float = option(0.75, "share of the GPU's free memory to use")
    max_num_seqs: int = option(512, "most sequences in one step")
    max_num_batched_tokens: int = option(8192, "most tokens in one step")
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step in which others decode; 0: no limit"
    )
    block_size: int = option(16, "tokens in one KV block", BLOCK_SIZES)
    scheduling_policy: str = option(
        "fcfs",
        f"which waiting request is next: {', '.join(SCHEDULING_POLICIES)} or module:function",
    )
    preemption_threshold: float = option(
        0.85, "share of KV blocks in use above which no waiting request starts"
    )
    preemption_mode: str = option(
        "auto", "what becomes of the blocks of a preempted sequence", PREEMPTION_MODES
    )
    swap_space: float = option(4, "GiB of pinned host memory for blocks of preempted sequences")
    pin_swap_space: bool = option(False, "pin the swap space at start, not at first need")
    wait_for_kernels: bool = option(
        False, "start when all kernels are compiled, not when those of the first step are"
    )
    num_gpu_blocks_override: int | None = option(
        None, "KV blocks to allocate (default: what fits; for tests of preemption)"
    )
    enable_prefix_caching: bool = option(
        True, "keep K and V of finished requests for equal prefixes"
    )
    enforce_eager: bool = option(False, "launch kernels one by one instead of as CUDA graphs")
    async_scheduling: bool | None = option(
        None, "launch a step before the tokens of the last one are read (default: on a GPU)"
    )
    seed: int = option(0, "seed of requests that set none")
    load_format: str = option(
        "auto", "what the weights are read from; dummy: they are random", LOAD_FORMATS
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    kernel_path: str = option("auto", "portable: no kernels for Hopper alone", KERNEL_PATHS)
    release_threshold: float = option(
        0.9, "share of its budget that the pool keeps when memory is freed"
    )
    pool_reuse_follow_event_dependencies: bool = option(
        True, "the pool reuses memory freed on another stream once an event orders it"
    )
    pool_reuse_allow_opportunistic: bool = option(
        True, "the pool reuses memory freed on another stream once that free is seen done"
    )
    pool_reuse_allow_internal_dependencies: bool = option(
        True, "the pool may make a stream wait for another's free to reuse its memory"
    )
    disable_log_stats: bool = option(
        False, "no periodic line of statistics in the log, nor a warning when KV blocks run low"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            # By type too: 16.0 equals 16, and an array compares as one.
            if choices and not any(type(value) is type(c) and value == c for c in choices):
                allowed = ", ".join(map(str, choices))
                raise InputError(f"{f.name}={value!r}: must be one of {allowed}")
        for name in ("model", "device", "scheduling_policy"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{name}={getattr(self, name)!r}: must be text")
        named = self.scheduling_policy in SCHEDULING_POLICIES
        if not named and not re.fullmatch(r"\w+(\.\w+)*:\w+", self.scheduling_policy):
            known = ", ".join(SCHEDULING_POLICIES)
            raise InputError(
                f"scheduling_policy={self.scheduling_policy!r}: must be one of {known}, or "
                "module:function"
            )
        check_int("max_num_seqs", self.max_num_seqs, 1, 4096)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 1 << 20)
        check_int("seed", self.seed, 0, (1 << 63) - 1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 1, 1 << 24)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}: each running sequence takes a token a step"
            )
        for name in ("gpu_memory_utilization", "release_threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"{name}={value!r}: must be a number")
            if not 0 < value <= 1:
                raise InputError(f"{name}={value}: must be above 0 and at most 1")
        threshold = self.preemption_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise InputError(f"preemption_threshold={threshold!r}: must be a number")
        if not RETURN_MARGIN < threshold <= 1:
            raise InputError(
                f"preemption_threshold={threshold}: must be above {RETURN_MARGIN} and at most 1"
            )
        check_number("swap_space", self.swap_space, 0, 1 << 20)
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise InputError("preemption_mode='swap' needs swap_space: it must be above 0, not 0")
        if self.num_gpu_blocks_override is not None:
            check_int("num_gpu_blocks_override", self.num_gpu_blocks_override, 1, 1 << 30)
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool) or (f.name == "async_scheduling" and value is not None):
                check_bool(f.name, value)
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,9})?", self.device):
            raise InputError(f"device={self.device!r}: must be auto, cpu, cuda or cuda:N")

    @property
    def gpu_index(self) -> int | None:
        """The number of the GPU to run on, where there is one; None if the CPU was asked for."""
        return None if self.device == "cpu" else int(self.device.partition(":")[2] or 0)


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """InputError, with the option's name, unless the value is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name}={value!r}: must be a number")
    if not low <= value <= high:  # False for NaN too
        raise InputError(f"{name}={value}: must be from {low:.10g} to {high:.10g}")


def check_int(name: str, value: Any, low: int, high: int | None) -> None:
    """InputError unless the value is an integer from `low` to `high` (None: without limit)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}={value!r}: must be an integer")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"{name}={value}: must be {limit}")


def check_bool(name: str, value: Any) -> None:
    """InputError unless the value is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r}: must be True or False")
