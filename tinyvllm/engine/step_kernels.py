"""The kernels that an engine's steps may need, found before there is a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tinyvllm.driver.spec import DeviceInfo, KernelSpec
from tinyvllm.engine.batch import MIN_CONTEXT_CLASS, row_bucket, size_class
from tinyvllm.ops.executor import described, writes_nothing
from tinyvllm.ops.launches import SizesRead, likeness
from tinyvllm.ops.program import Op, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

GRID = 1.1  # from a number of tokens to the next that is looked at
Sizes = Mapping[str, int]


def step_kernels(
    programs: Iterable[Program], limits: Sizes, act: DType, info: DeviceInfo
) -> list[KernelSpec]:
    """Each specialisation once. Launches are pure functions of sizes, so no device is needed.

    Of steps with prompts some sizes are looked at; what they miss is compiled when a step needs it.
    """
    found: dict[KernelSpec, None] = {}
    decode, mixed = list(_decode_sizes(limits)), list(_mixed_sizes(limits))
    seen = set()
    for program in programs:
        sizes = decode if program.name.startswith("decode") else mixed
        for op in program.ops:
            key = id(sizes), likeness(program, op)
            if key not in seen:
                seen.add(key)
                found |= dict.fromkeys(_op_kernels(program, op, sizes, act, info))
    return list(found)


def _op_kernels(
    program: Program, op: Op, all_sizes: Iterable[Sizes], act: DType, info: DeviceInfo
) -> Iterator[KernelSpec]:
    """Specialisations of one op, many times the same."""
    names: set[str] = set()  # of the sizes that it looks at
    done: set[tuple[int, ...]] = set()  # their values
    for dims in all_sizes:
        if done and tuple(dims[name] for name in names) in done:
            continue
        sizes = SizesRead(dims)
        if not writes_nothing(program, op, sizes):
            operands = described(program, op, sizes, act)
            yield from (launch.spec for launch in op_def(op.kind).launches(operands, info))
        if sizes.read.keys() - names:
            names |= sizes.read.keys()
            done.clear()
        done.add(tuple(dims[name] for name in names))


def _decode_sizes(limits: Sizes) -> Iterator[Sizes]:
    """Of steps in which all rows decode, with short contexts and with long ones."""
    most = limits["R"]
    for n in dict.fromkeys(row_bucket(n, most) for n in range(1, most + 1)):
        for context in {MIN_CONTEXT_CLASS, limits["C"]}:
            rows = {"T": n, "R": n, "R1": n + 1, "S": n, "D": n, "Q": 0}
            yield {**limits, **rows, "C": context}


def _mixed_sizes(limits: Sizes) -> Iterator[Sizes]:
    """Of steps with a prompt, alone and beside rows that decode, with short and long contexts."""
    for tokens in _grid(limits["T"]):
        for decodes in {0, min(limits["R"], tokens) // 2}:
            n, query = decodes + 1, size_class(tokens - decodes)
            rows = {"T": tokens, "R": n, "R1": n + 1, "S": n, "D": decodes, "Q": query}
            for context in {max(query, MIN_CONTEXT_CLASS), limits["C"]}:
                yield {**limits, **rows, "C": context}


def _grid(most: int) -> Iterator[int]:
    """1 to `most`, in steps that grow with the number."""
    n = 1
    while n < most:
        yield n
        n = max(n + 1, int(n * GRID))
    yield most
