"""Runs programs on the CPU in float32, through the same kind of arena plan as the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tinyvllm.driver.recorder import Span
from tinyvllm.driver.trace_formats import HOST_TRACK
from tinyvllm.memory.plan import Plan
from tinyvllm.ops.executor import (
    Dims,
    Recent,
    Report,
    bind,
    follows,
    plan_program,
    writes_nothing,
)
from tinyvllm.ops.op import OpDef, Operands
from tinyvllm.ops.program import EXTERNAL, INPUT, OUTPUT, STATE, TEMP, Op, Program, concrete
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

MAX_BOUND = 64  # bound runs kept for reuse: decode repeats its sizes, prefill seldom does


@dataclass(frozen=True)
class _Step:
    """One op bound to arrays: its primitives in order, and what is dead after it."""

    op: Op
    primitives: tuple[tuple[OpDef, Operands, tuple[np.ndarray, ...]], ...]
    dead: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class NumpyResult:
    """Outputs copied out of the arena when the run ended."""

    outputs: dict[str, np.ndarray]

    def get(self) -> dict[str, np.ndarray]:
        """The fetched outputs by name."""
        return self.outputs

    def discard(self) -> None:
        """Nothing waits for them."""


class NumpyExecutor:
    """The device when there is no GPU, and what the kernels are compared with.

    A fused op runs as the primitives that it replaced. `weights` are float32 arrays by the names
    of the checkpoint (already rounded to the model's type). With `poison` a buffer is filled with
    NaN after its last use, so that an error of the planner shows. With `round_to` every
    activation is rounded to that type when written: the low-precision twin of the GPU.
    """

    def __init__(
        self,
        programs: Iterable[Program],
        weights: Mapping[str, np.ndarray],
        states: Mapping[str, np.ndarray],
        limits: Dims,
        *,
        poison: bool = False,
        round_to: DType | None = None,
    ) -> None:
        self._programs = {p.name: p for p in programs}
        self._weights = weights
        self._states = states
        self._limits = limits
        self._poison = poison
        self._round_to = round_to
        self.plans: dict[str, Plan] = {
            p.name: plan_program(p, limits, DType.F32) for p in self._programs.values()
        }
        # Programs that read another's outputs get an arena of their own: both are in use.
        own = {n for n, p in self._programs.items() if follows(p)}
        sizes = {n: plan.arena_bytes for n, plan in self.plans.items()}
        shared = np.zeros(max((sizes[n] for n in sizes if n not in own), default=0), np.uint8)
        self._arenas = {n: np.zeros(sizes[n], np.uint8) if n in own else shared for n in sizes}
        self._inputs = {
            b.name: np.zeros(concrete(b.shape, limits), b.dtype.storage if b.dtype else np.float32)
            for p in self._programs.values()
            for b in p.of_kind(INPUT)
        }
        self._report: Report | None = None
        self._bound = Recent[tuple[_Step, ...]](MAX_BOUND)
        self._previous: dict[str, np.ndarray] = {}  # outputs of the program that ran last

    def run(
        self,
        program: str,
        dims: Dims,
        inputs: Mapping[str, np.ndarray],
        fetch: tuple[str, ...],
        graph: bool = False,
    ) -> NumpyResult:
        """Runs a program; see `Executor.run`."""
        p, sizes = self._programs[program], dims
        dims = {**self._limits, **dims}
        for name, value in inputs.items():
            self._inputs[name][tuple(slice(n) for n in value.shape)] = value
        start, ops = time.perf_counter(), []
        for step in self._steps(p, dims):
            begin = time.perf_counter()
            self._compute(step)
            if self._report is not None:
                seconds = time.perf_counter() - begin
                about = {**step.op.operands, **step.op.attrs}
                ops.append(Span(step.op.kind, begin, seconds, about))
        if self._report is not None:
            whole = Span(program, start, time.perf_counter() - start, dict(sizes))
            self._report(HOST_TRACK, whole, ops)
        outputs = {b.name: self._array(p, b.name, dims) for b in p.of_kind(OUTPUT)}
        if not follows(p):
            self._previous = outputs
        return NumpyResult({name: outputs[name].copy() for name in fetch})

    def _compute(self, step: _Step) -> None:
        for op_type, operands, activations in step.primitives:
            op_type.reference(operands)
            if self._round_to is not None:
                for array in activations:
                    array[...] = self._round_to.round(array)
        if self._poison:
            for array in step.dead:
                array.view(np.uint8)[...] = 0xFF  # NaN as float32, -1 as int32

    def report_times(self, report: Report | None) -> None:
        """Reports the host's time of each op; see `Executor.report_times`."""
        self._report = report

    def write_row(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes the first elements of one row of a state."""
        self._states[name][row].reshape(-1)[: values.size] = values.reshape(-1)

    def close(self) -> None:
        """Drops the arrays; the executor cannot run any more."""
        self._bound.clear()
        self._previous.clear()
        self._weights, self._states, self._arenas, self._inputs = {}, {}, {}, {}

    def _array(self, p: Program, name: str, dims: Dims) -> np.ndarray:
        """The float32 or int32 array that stands for a buffer, weight or constant."""
        if name in p.constants:
            return p.constants[name]
        if name not in p.buffers:
            return self._weights[name]
        b = p.buffers[name]
        if b.parent is not None:
            return self._array(p, b.parent, dims)[:, b.column : b.column + int(b.shape[-1])]
        shape = concrete(b.shape, dims)
        if b.kind == INPUT:
            return self._inputs[name][tuple(slice(n) for n in shape)]
        if b.kind == STATE:
            return self._states[name]
        if b.kind == EXTERNAL:
            return self._previous[name]
        dtype = np.int32 if b.dtype is DType.I32 else np.float32
        offset = self.plans[p.name].offsets[name]
        return self._arenas[p.name][offset : offset + prod(shape) * 4].view(dtype).reshape(shape)

    def _steps(self, p: Program, dims: Dims) -> tuple[_Step, ...]:
        key = (p.name, *sorted(dims.items()))
        if (bound := self._bound.get(key)) is not None:
            return bound
        last: dict[str, int] = {}
        for i, op in enumerate(p.ops):
            for names in p.accesses(op):
                last.update(dict.fromkeys(names, i))
        steps = tuple(
            _Step(
                op,
                tuple(self._primitives(p, op, dims)),
                tuple(
                    self._array(p, n, dims)
                    for n, end in last.items()
                    if end == i and p.buffers[n].kind == TEMP
                ),
            )
            for i, op in enumerate(p.ops)
            if not writes_nothing(p, op, dims)
        )
        if not follows(p):  # what it reads lies elsewhere the next time
            self._bound.put(key, steps)
        return steps

    def _primitives(
        self, p: Program, op: Op, dims: Dims
    ) -> Iterable[tuple[OpDef, Operands, tuple[np.ndarray, ...]]]:
        local = {b.name: np.full(concrete(b.shape, dims), np.nan, np.float32) for b in op.local}
        buffers = {**p.buffers, **{b.name: b for b in op.local}}
        for part in op.parts or (op,):
            op_type = op_def(part.kind)

            def resolve(name: str) -> np.ndarray:
                return local[name] if name in local else self._array(p, name, dims)

            operands = bind(part, dims, DType.F32, resolve)
            # What is stored in the activation type on the GPU: temporaries and the KV cache.
            outputs = tuple(
                getattr(operands, w)
                for w in op_type.writes
                if w in part.operands and buffers[part.operands[w]].dtype is None
            )
            yield op_type, operands, outputs
