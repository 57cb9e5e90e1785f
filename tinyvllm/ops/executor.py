"""What the CUDA and the NumPy executor share: interface, arena plans, operands and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tinyvllm.driver.recorder import Span
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.plan import Lifetime, Plan, plan_buffers
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import (
    EXTERNAL,
    INPUT,
    OUTPUT,
    TEMP,
    Buffer,
    Op,
    Program,
    concrete,
    role_of,
)
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType, align_up

Dims = Mapping[str, int]
# Takes what a run's ops ran on, the run, and its ops with their times.
Report = Callable[[str, Span, list[Span]], None]
Value = TypeVar("Value")


class Result(Protocol):
    """The fetched outputs of one run. Each must be asked for once, or discarded.

    `get` waits for them and for nothing else. `discard` after either does nothing.
    """

    def get(self) -> dict[str, np.ndarray]: ...

    def discard(self) -> None: ...


class Recent(Generic[Value]):
    """Keeps at most `size` values by key, those looked up last; the others go to `drop`."""

    def __init__(self, size: int, drop: Callable[[Value], object] = lambda value: None) -> None:
        self._size, self._drop = size, drop
        self._values: dict[object, Value] = {}  # the one not used for longest first

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: object) -> Value | None:
        """The value kept under `key`, from now on the one used last."""
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        return value

    def put(self, key: object, value: Value) -> None:
        """Keeps a value under a key that has none."""
        while len(self._values) >= self._size:
            self._drop(self._values.pop(next(iter(self._values))))
        self._values[key] = value

    def clear(self) -> None:
        """Drops all."""
        while self._values:
            self._drop(self._values.popitem()[1])


class Executor(Protocol):
    """Runs programs over state that it keeps; the engine sees nothing else of a device."""

    def run(
        self,
        program: str,
        dims: Dims,
        inputs: Mapping[str, np.ndarray],
        fetch: tuple[str, ...],
        graph: bool = False,
    ) -> Result:
        """Runs a program with these sizes and inputs; `fetch` names the outputs wanted back.

        `graph` says that these sizes will come again, so that capturing a CUDA graph pays.
        """
        ...

    def write_row(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes the first elements of one row of a state, before the runs that follow."""
        ...

    def report_times(self, report: Report | None) -> None:
        """From now on reports each run of a step with the times of its ops; None: no longer.

        Times are of ops (on the CPU) or launches (on the GPU) that run one after the other: no
        graph, and no launch begins before the one before it has ended.
        """
        ...

    def close(self) -> None: ...


def scratch_name(index: int) -> str:
    """Name in the plan of the scratch memory of op number `index`."""
    return f"scratch.{index}"


def lifetimes(
    program: Program, dims: Dims, act: DType, device: DeviceInfo | None
) -> list[Lifetime]:
    """First and last use of every planned buffer (and scratch) of a program.

    `dims` are the largest sizes the plan is for. An output lives to the program's end. Buffers of
    equal role lie at one offset, so that every layer runs in the same places. Raises
    ValueError where an op reads a planned buffer that nothing has written.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(program.ops):
        reads, writes = program.accesses(op)
        for name in reads:
            if program.buffers[name].kind in (TEMP, OUTPUT) and name not in first:
                raise ValueError(
                    f"{program.name}: op {i} ({op.kind}) reads {name} before it is written"
                )
        for name in (*reads, *writes):
            first.setdefault(name, i)
            last[name] = i  # rule 1 of memory/plan.py: in the end, the last use
    check_reads(program, last)
    result = []
    for b in program.of_kind(TEMP, OUTPUT):
        if b.name in first:
            size = prod(concrete(b.shape, dims)) * (b.dtype or act).itemsize
            end = len(program.ops) if b.kind == OUTPUT else last[b.name]
            result.append(Lifetime(b.name, size, first[b.name], end, role_of(b.name)))
    if device is not None:
        for i, op in enumerate(program.ops):
            if size := op_def(op.kind).scratch(described(program, op, dims, act), device):
                result.append(Lifetime(scratch_name(i), size, i, i, f"scratch.{op.kind}"))
    return result


def check_reads(program: Program, last: Mapping[str, int]) -> None:
    """Rule 2 of memory/plan.py: nothing reads a buffer after the op number `last[name]`.

    It looks at the operands themselves, also at those of the primitives that a fused op replaced
    (the NumPy executor runs them, in the same places); ValueError names the op that reads too late.
    """
    for i, op in enumerate(program.ops):
        for part in (op, *op.parts):
            for operand, name in part.operands.items():
                planned = name in program.buffers and operand not in op_def(part.kind).writes
                if planned and last.get(program.root(name), i) < i:
                    raise ValueError(
                        f"{program.name}: op {i} ({op.kind}) reads {name} after its last use"
                    )


def plan_program(
    program: Program, dims: Dims, act: DType, device: DeviceInfo | None = None
) -> Plan:
    """Arena plan of a program for sizes up to `dims`; without a device no op needs scratch."""
    return plan_buffers(lifetimes(program, dims, act, device))


def arena_plans(
    programs: Iterable[Program], dims: Dims, act: DType, device: DeviceInfo
) -> dict[str, Plan]:
    """By name, the plans of the programs that share an executor's arena: those of steps."""
    return {p.name: plan_program(p, dims, act, device) for p in programs if not follows(p)}


def bind(
    op: Op,
    dims: Dims,
    act: DType,
    resolve: Callable[[str], Any],
    scratch: int = 0,
) -> Operands:
    """The op's operands with each buffer, weight and constant replaced by `resolve(name)`."""
    op_type = op_def(op.kind)
    arrays = dict.fromkeys((*op_type.reads, *op_type.writes))
    arrays |= {operand: resolve(name) for operand, name in op.operands.items()}
    return Operands(**arrays, **op.attrs, dims=dims, act=act, scratch=scratch)


def described(program: Program, op: Op, dims: Dims, act: DType) -> Operands:
    """The op's operands as arrays at address 0: enough for costs, scratch sizes and launches."""

    def resolve(name: str) -> DeviceArray:
        if name in program.buffers:
            b = program.buffers[name]
            if b.parent is not None:
                parent: DeviceArray = resolve(b.parent)
                return parent.columns(b.column, int(b.shape[-1]))
            return DeviceArray(0, concrete(b.shape, dims), b.dtype or act)
        if name in program.weights:
            return DeviceArray(0, program.weights[name].shape, act)
        return DeviceArray(0, program.constants[name].shape, DType.F32)

    return bind(op, dims, act, resolve)


def writes_nothing(program: Program, op: Op, dims: Dims) -> bool:
    """True if all that the op writes is empty at these sizes (no row is sampled, say)."""
    op_type = op_def(op.kind)
    return all(
        0 in concrete(program.buffers[op.operands[w]].shape, dims)
        for w in op_type.writes
        if w in op.operands
    )


def follows(program: Program) -> bool:
    """Whether a program reads outputs of the one that ran just before it."""
    return any(True for _ in program.of_kind(EXTERNAL))


@dataclass(frozen=True)
class InputLayout:
    """Byte offsets of a program's inputs in one region, so that a step needs one copy.

    Inputs are laid out for their largest sizes, in order of declaration. A step copies from the
    first one that it fills to the end of the last: what decode steps leave out should be declared
    first, what varies most in length last.
    """

    offsets: dict[str, int]
    num_bytes: int

    @staticmethod
    def of(buffers: list[Buffer], limits: Dims) -> InputLayout:
        """The layout of these input buffers for sizes up to `limits`."""
        offsets, end = {}, 0
        for b in buffers:
            assert b.kind == INPUT and b.dtype is not None
            offsets[b.name] = end
            end += align_up(prod(concrete(b.shape, limits)) * b.dtype.itemsize, 16)
        return InputLayout(offsets, end)
