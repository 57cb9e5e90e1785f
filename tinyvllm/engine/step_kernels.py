"""The kernels that an engine's steps may need, found before there is a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tinyvllm.driver.spec import DeviceInfo, KernelSpec
from tinyvllm.engine.batch import MIN_CONTEXT_CLASS, row_bucket, size_class
from tinyvllm.ops.executor import described, writes_nothing
from tinyvllm.ops.launches import likeness
from tinyvllm.ops.program import Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

GRID = 1.5  # from a number of tokens to the next that is looked at


def step_kernels(
    programs: Iterable[Program], limits: Mapping[str, int], act: DType, info: DeviceInfo
) -> list[KernelSpec]:
    """Each specialisation once. Launches are pure functions of sizes, so no device is needed.

    Sizes are sampled: what they miss is compiled when a step first needs it.
    """
    found: dict[KernelSpec, None] = {}
    sizes = {True: list(_decode_sizes(limits)), False: list(_mixed_sizes(limits))}
    seen = set()
    for program in programs:
        decode = program.name.startswith("decode")
        for op in program.ops:
            key = decode, likeness(program, op)
            if key in seen:
                continue
            seen.add(key)
            for dims in sizes[decode]:
                if not writes_nothing(program, op, dims):
                    operands = described(program, op, dims, act)
                    launches = op_def(op.kind).launches(operands, info)
                    found |= dict.fromkeys(launch.spec for launch in launches)
    return list(found)


def _decode_sizes(limits: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Of steps in which all rows decode, with short contexts and with long ones."""
    most = limits["R"]
    for n in dict.fromkeys(row_bucket(n, most) for n in _grid(most)):
        for context in {MIN_CONTEXT_CLASS, limits["C"]}:
            rows = {"T": n, "R": n, "R1": n + 1, "S": n, "D": n, "Q": 0}
            yield {**limits, **rows, "C": context}


def _mixed_sizes(limits: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Of steps with a prompt, alone and beside rows that decode."""
    for tokens in _grid(limits["T"]):
        for decodes in {0, min(limits["R"], tokens) // 2}:
            n, query = decodes + 1, size_class(tokens - decodes)
            rows = {"T": tokens, "R": n, "R1": n + 1, "S": n, "D": decodes, "Q": query}
            yield {**limits, **rows, "C": max(query, MIN_CONTEXT_CLASS)}


def _grid(most: int) -> Iterator[int]:
    """1 to `most`, in steps that grow with the number."""
    n = 1
    while n < most:
        yield n
        n = max(n + 1, int(n * GRID))
    yield most
