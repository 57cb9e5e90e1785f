"""How far what a kernel leaves is from its op's reference, and how far it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tinyvllm.ops.numpy_executor import NumpyExecutor
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Op, Program, Weight
from tinyvllm.util import DType

# Half the spacing of a type's values, relative to them.
EPSILON = {DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}


@dataclass(frozen=True)
class Error:
    """How far the kernel's output is from the reference, and how far it may be."""

    output: str
    error: float
    rounded: float  # the error of the same maths rounded to the activations' type
    scale: float  # the largest value
    act: DType

    @property
    def ok(self) -> bool:
        return self.error <= 2 * self.rounded + EPSILON[self.act] * self.scale


def unpacked(weight: Weight, values: np.ndarray, heights: list[int]) -> dict[str, np.ndarray]:
    """The checkpoint's tensors, of so many rows each, that a packed weight was made from."""
    if weight.interleave:
        g, count = weight.interleave, len(weight.parts)
        groups = values.reshape(-1, count, g, *values.shape[1:])
        parts = [groups[:, i].reshape(-1, *values.shape[1:]) for i in range(count)]
    else:
        parts = np.split(values, np.cumsum(heights)[:-1])
    return dict(zip(weight.parts, parts, strict=True))


def reference_errors(
    program: Program,
    op: Op,
    dims: Mapping[str, int],
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    act: DType,
) -> list[Error]:
    """Compares what an op has left in each buffer that it writes with its reference.

    `before` has all that it reads (packed weights too) and the states that it writes. The error of
    a token that greedy sampling takes right from a product: its logit is less than the largest.
    """
    if op.parts and op.parts[-1].kind == "sample":
        tokens, logits = op.operands["tokens"], op.parts[-1].operands["logits"]
        product = _product_of(op)
        with_logits = replace(program, buffers={b.name: b for b in op.local} | program.buffers)
        made = references(with_logits, product, dims, before, act)
        want, twin = made[0][logits], made[1][logits]
        have = np.take_along_axis(want, after[tokens][:, None].astype(np.int64), 1)
        return [
            Error(
                tokens,
                float((want.max(1, keepdims=True) - have).max()),
                float(np.abs(twin - want).max()),
                float(np.abs(want).max()),
                act,
            )
        ]
    exact, rounded = references(program, op, dims, before, act)
    return [
        Error(
            name,
            float(np.abs(after[name] - exact[name]).max(initial=0)),
            float(np.abs(rounded[name] - exact[name]).max(initial=0)),
            float(np.abs(exact[name]).max(initial=0)),
            act,
        )
        for name in exact
    ]


def _product_of(op: Op) -> Op:
    """A product that samples, without that: its logits are its output."""
    *parts, sample = op.parts
    logits = sample.operands["logits"]
    operands = {n: b for n, b in op.operands.items() if n not in sample.operands}
    return Op(
        op.kind.removesuffix("_sample"),
        {**operands, "y": logits},
        op.attrs,
        tuple(parts),
        tuple(b for b in op.local if b.name != logits),
    )


def references(
    program: Program, op: Op, dims: Mapping[str, int], before: Mapping[str, np.ndarray], act: DType
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What the reference leaves in the buffers that the op writes: exact, and rounded to `act`."""
    alone = program.with_ops([op])
    reads, writes = alone.accesses(op)
    inside = [n for part in op.parts for n in part.operands.values() if n in alone.buffers]
    for name in {*reads, *(alone.root(n) for n in inside)} - set(writes):
        if alone.buffers[name].kind != STATE:
            alone.buffers[name] = replace(alone.buffers[name], kind=INPUT)
    for name in writes:
        if alone.buffers[name].kind != STATE:
            alone.buffers[name] = replace(alone.buffers[name], kind=OUTPUT)
    weights = dict(before)
    for operand in ("weight", "bias"):
        if (packed := op.operands.get(operand)) in alone.weights and op.parts:
            widths = {b.name: b.shape[-1] for b in (*program.buffers.values(), *op.local)}
            products = [part for part in op.parts if part.kind == "matmul"]
            heights = [int(widths[part.operands["y"]]) for part in products]
            weights |= unpacked(alone.weights[packed], before[packed], heights)
    inputs = {b.name: before[b.name] for b in alone.of_kind(INPUT)}
    outputs = tuple(b.name for b in alone.of_kind(OUTPUT))

    def run(round_to: DType | None) -> dict[str, np.ndarray]:
        states = {b.name: before[b.name].copy() for b in alone.of_kind(STATE)}
        executor = NumpyExecutor([alone], weights, states, dims, round_to=round_to)
        return states | executor.run(alone.name, dims, inputs, outputs).get()

    exact, twin = run(None), run(act)
    return {name: exact[name] for name in writes}, {name: twin[name] for name in writes}
