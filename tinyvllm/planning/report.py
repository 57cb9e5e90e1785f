"""The numbers of `tinyvllm plan`: buffers of each program, KV cache, what fits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyvllm.bench.lengths import Lengths
from tinyvllm.config import EngineConfig
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.engine.batch import row_bucket, step_limits
from tinyvllm.engine.sizing import engine_programs, model_dtype, plan_engine
from tinyvllm.memory.budget import MemoryPlan
from tinyvllm.memory.plan import Lifetime, Plan, plan_buffers
from tinyvllm.model.config import ModelConfig
from tinyvllm.ops.executor import follows, lifetimes, scratch_name
from tinyvllm.ops.program import Program, layer_of
from tinyvllm.planning.waste import Waste, waste_by_block_size
from tinyvllm.util import DType, InputError


@dataclass(frozen=True)
class BufferPlan:
    """The buffers of a program at given sizes, in their arena."""

    program: Program
    tokens: int
    rows: int
    lives: list[Lifetime]
    plan: Plan

    @property
    def title(self) -> str:
        """Which program at which size, for people."""
        decode = self.program.name.startswith("decode")
        count, unit = (self.rows, "row") if decode else (self.tokens, "token")
        return f"{self.program.name}, {count} {unit}{'s' if count != 1 else ''}"

    @property
    def ratio(self) -> float:
        """Arena bytes over the least that any assignment of offsets needs."""
        return self.plan.arena_bytes / max(self.plan.lower_bound, 1)

    @property
    def layers_agree(self) -> bool:
        """Whether the same buffer of every layer lies at the same offset."""
        places = defaultdict(set)
        for b in self.lives:
            if self.layer(b) is not None:
                places[b.role].add(self.plan.offsets[b.name])
        return all(len(offsets) == 1 for offsets in places.values())

    @property
    def num_layers(self) -> int:
        """How many layers the program has."""
        return 1 + max((layer_of(b.name) or 0 for b in self.lives), default=0)

    def layer(self, life: Lifetime) -> int | None:
        """The layer of a buffer; scratch memory belongs to its op's. None: of no layer."""
        own = layer_of(life.name)
        return self.op_layer(life.first) if own is None and _is_scratch(life) else own

    def op_layer(self, index: int) -> int | None:
        """The layer that an op works for: that of a buffer that it writes, or else reads."""
        reads, writes = self.program.accesses(self.program.ops[index])
        layers = [layer_of(name) for name in (*writes, *reads)]
        return next((layer for layer in layers if layer is not None), None)

    def heirs(self, name: str) -> list[str]:
        """The buffers (by role) that take over memory of this one, in order, until its role
        comes again in the next layer."""
        lives = {b.name: b for b in self.lives}
        old, start = lives[name], self.plan.offsets[name]
        found: list[str] = []
        for new in sorted(self.lives, key=lambda b: (b.first, b.name)):
            if new.first <= old.last:
                continue
            if new.role == old.role:
                break
            offset = self.plan.offsets[new.name]
            if start < offset + new.size and offset < start + old.size and new.role not in found:
                found.append(new.role)
        return found


def _is_scratch(life: Lifetime) -> bool:
    return life.name == scratch_name(life.first)


@dataclass(frozen=True)
class Report:
    """What `tinyvllm plan` knows. `memory` is None where the model does not fit: `problem` then
    says what is missing and what to change."""

    where: str
    device: str
    free_bytes: int
    config: EngineConfig
    memory: MemoryPlan | None
    problem: str
    max_model_len: int
    token_bytes: int  # of K and V of one token in all layers
    buffers: list[BufferPlan]
    waste: list[Waste]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V the cache holds."""
        return self.memory.num_blocks * self.config.block_size if self.memory else 0

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "model": self.where,
            "device": self.device,
            "free_bytes": self.free_bytes,
            "options": asdict(self.config),
            "fits": self.memory is not None,
            "problem": self.problem,
            "memory": asdict(self.memory) | {"kv": self.memory.kv} if self.memory else None,
            "kv_tokens": self.kv_tokens,
            "kv_bytes_per_token": self.token_bytes,
            "max_model_len": self.max_model_len,
            "longest_sequences": self.kv_tokens // self.max_model_len,
            "waste": [asdict(row) for row in self.waste],
            "programs": [
                {
                    "program": b.program.name,
                    "tokens": b.tokens,
                    "rows": b.rows,
                    "ops": len(b.program.ops),
                    "arena_bytes": b.plan.arena_bytes,
                    "bytes_without_reuse": b.plan.bytes_without_reuse,
                    "lower_bound": b.plan.lower_bound,
                    "ratio": b.ratio,
                    "layers_agree": b.layers_agree,
                }
                for b in self.buffers
            ],
        }


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Every number of rows that a decode step is padded to."""
    return sorted({row_bucket(n, max_num_seqs) for n in range(1, max_num_seqs + 1)})


def plan_report(
    config: EngineConfig,
    where: str,
    model: ModelConfig,
    device: DeviceInfo,
    free_bytes: int,
    lengths: list[Lengths],
) -> Report:
    """The report for a GPU like `device` with `free_bytes` free; InputError for bad options.

    A model that does not fit is no error: the report says so.
    """
    longest = config.max_model_len or model.max_context
    model.check_max_model_len(longest)
    programs = engine_programs(config, model, primitive=False)
    act = model_dtype(config, model)
    memory, problem = None, ""
    try:
        memory, longest = plan_engine(
            config, model, programs, free_bytes=free_bytes, act=act, device=device
        )
    except InputError as error:
        problem = str(error)
    kv_heads = model.num_hidden_layers * 2 * model.num_key_value_heads
    token_bytes = kv_heads * model.head_dim * act.itemsize
    kv_bytes = memory.kv if memory else 0
    return Report(
        where,
        device.name,
        free_bytes,
        config,
        memory,
        problem,
        longest,
        token_bytes,
        _all_buffers(config, programs, longest, act, device),
        waste_by_block_size(lengths, kv_bytes, token_bytes),
    )


def _all_buffers(
    config: EngineConfig,
    programs: list[Program],
    max_model_len: int,
    act: DType,
    device: DeviceInfo,
) -> list[BufferPlan]:
    """Each prefill program at the largest step, each decode program at every bucket."""
    found = []
    for program in programs:
        decode = program.name.startswith("decode")
        if follows(program) or not program.weights:
            continue  # not a step: it runs behind one, or has no buffers
        for rows in decode_buckets(config.max_num_seqs) if decode else [config.max_num_seqs]:
            step = replace(config, max_num_seqs=rows)
            found.append(buffer_plan(step, program, max_model_len, act, device))
    return found


def buffer_plan(
    config: EngineConfig, program: Program, max_model_len: int, act: DType, device: DeviceInfo
) -> BufferPlan:
    """The buffers of a program for the largest step that the options allow."""
    rows = config.max_num_seqs
    decode = program.name.startswith("decode")
    tokens = rows if decode else config.max_num_batched_tokens
    dims = step_limits(rows, tokens, max_model_len, config.block_size)
    lives = lifetimes(program, {**dims, "NB": 1}, act, device)
    return BufferPlan(program, tokens, rows, lives, plan_buffers(lives))
