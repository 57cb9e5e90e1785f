"""A forward pass as data: buffers with symbolic shapes and a flat list of ops over them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tinyvllm.util import DType

Dim = int | str  # a size, or the name of a size known at run time: "T" tokens, "R" rows, ...
Shape = tuple[Dim, ...]

INPUT = "input"  # written by the host before each step
STATE = "state"  # lives as long as the engine: KV cache, block tables, row state
TEMP = "temp"  # planned into the arena, free after its last use
OUTPUT = "output"  # planned into the arena, kept to the end of the program
EXTERNAL = "external"  # an output of the program that ran just before

_LAYER = re.compile(r"^layer(\d+)\.")


@dataclass(frozen=True)
class Buffer:
    """A named array. `dtype` None means the activation type (bf16/fp16 on the GPU, float32 on
    the CPU). A buffer with a `parent` is columns [column, column + shape[-1]) of it."""

    name: str
    shape: Shape
    dtype: DType | None
    kind: str = TEMP
    parent: str | None = None
    column: int = 0


@dataclass(frozen=True)
class Weight:
    """A parameter of the model as the program wants it laid out.

    `parts` names the checkpoint tensors, stacked along the rows; `interleave` > 0 alternates that
    many rows of each part instead (all parts equally tall, a multiple of it). `split_axis` is the
    axis that tensor parallelism may cut. `scheme` names the number format of the stored values.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    interleave: int = 0
    split_axis: int | None = None
    scheme: str = "plain"


@dataclass(frozen=True)
class Op:
    """One operation: `operands` maps the names of the op's declaration to buffers, weights or
    constants. A fused op carries in `parts` the primitive ops that it replaced, which are its
    reference, and in `local` the buffers that exist only between those."""

    kind: str
    operands: Mapping[str, str]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Op, ...] = ()
    local: tuple[Buffer, ...] = ()


@dataclass
class Program:
    """Buffers, weights, constants and ops; `dims` in shapes are bound when it runs."""

    name: str
    buffers: dict[str, Buffer] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def buffer(self, name: str, shape: Shape, dtype: DType | None = None, kind: str = TEMP) -> str:
        """Declares a buffer and returns its name; declaring the same one again is allowed."""
        new = Buffer(name, shape, dtype, kind)
        if self.buffers.setdefault(name, new) != new:
            raise ValueError(f"buffer {name} declared twice: {self.buffers[name]} and {new}")
        return name

    def weight(self, name: str, *shape: int, split_axis: int | None = None) -> str:
        """Declares a weight stored as in the checkpoint."""
        self.weights[name] = Weight(name, shape, (name,), split_axis=split_axis)
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        """Declares a float32 array that is computed from the configuration."""
        self.constants[name] = value
        return name

    def shape_of(self, name: str) -> Shape:
        """Shape of a buffer, weight or constant."""
        if name in self.buffers:
            return self.buffers[name].shape
        if name in self.weights:
            return self.weights[name].shape
        return self.constants[name].shape

    def emit(
        self,
        kind: str,
        out: str | None = None,
        *,
        dtype: DType | None = None,
        out_kind: str = TEMP,
        **operands: Any,
    ) -> str:
        """Appends an op and returns the name of what it writes.

        `operands` are buffer, weight or constant names by the op's operand names (None: absent),
        and its attributes. Of the op's outputs one not given is declared under the name `out`
        with the shape that follows from the contract; its `dtype` defaults to the op's.
        """
        from tinyvllm.ops.registry import op_def  # the registry imports the ops, which import us

        op_type = op_def(kind)
        attrs = {k: v for k, v in operands.items() if k in op_type.attrs}
        names = {k: v for k, v in operands.items() if k not in op_type.attrs and v is not None}
        sizes = op_type.bind(self, names)
        for operand, shape in op_type.writes.items():
            if operand not in names:
                assert out is not None, f"{kind} needs a name for {operand}"
                full = tuple(sizes.get(s, s) if isinstance(s, str) else s for s in shape)
                out_dtype = dtype or op_type.out_dtypes.get(operand)
                names[operand] = self.buffer(out, full, out_dtype, out_kind)
        op = Op(kind, names, attrs)
        op_type.check(self, op)
        self.ops.append(op)
        first: str = names[next(iter(op_type.writes))]
        return first

    def root(self, name: str) -> str:
        """The buffer that owns the memory of `name`: its parent for a column view."""
        return self.buffers[name].parent or name

    def accesses(self, op: Op) -> tuple[list[str], list[str]]:
        """(read, written) buffers of an op, views resolved to their parents."""
        from tinyvllm.ops.registry import op_def

        op_type = op_def(op.kind)
        reads = [op.operands[r] for r in op_type.reads if r in op.operands]
        writes = [self.root(op.operands[w]) for w in op_type.writes if w in op.operands]
        return [self.root(r) for r in reads if r in self.buffers], writes

    def of_kind(self, *kinds: str) -> Iterator[Buffer]:
        """The buffers of these kinds, in order of declaration, without column views."""
        return (b for b in self.buffers.values() if b.kind in kinds and b.parent is None)

    def with_ops(self, ops: list[Op]) -> Program:
        """A copy with other ops, keeping only the buffers and weights that those use.

        Of the primitives inside fused ops the buffers are kept, but not the weights: those are
        what the fused op's own weights were packed from.
        """
        used = {name for op in ops for name in op.operands.values()}
        for op in ops:
            inside = {name for part in op.parts for name in part.operands.values()}
            used |= (inside & set(self.buffers)) - {b.name for b in op.local}
        used |= {self.root(n) for n in used if n in self.buffers}
        return replace(
            self,
            ops=ops,
            buffers={n: b for n, b in self.buffers.items() if n in used},
            weights={n: w for n, w in self.weights.items() if n in used},
            constants=dict(self.constants),
        )


def concrete(shape: Shape, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The shape with run-time sizes filled in."""
    return tuple(dims[s] if isinstance(s, str) else s for s in shape)


def role_of(name: str) -> str:
    """What a buffer is in any layer: models name their layers' buffers layer0.q, layer1.q, ..."""
    return _LAYER.sub("", name)


def layer_of(name: str) -> int | None:
    """The layer that a buffer belongs to; None for one of no layer."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None
