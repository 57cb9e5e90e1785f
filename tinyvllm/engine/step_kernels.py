"""The kernels that an engine's steps may need, found before there is a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tinyvllm.driver.spec import DeviceInfo, KernelSpec
from tinyvllm.engine.batch import MIN_CONTEXT_CLASS, row_bucket, size_class
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.launches import BoundOp, Place, SizesRead, likeness
from tinyvllm.ops.program import Op, Program
from tinyvllm.util import DType

GRID = 1.1  # from a number of tokens to the next that is looked at
FIRST_PROMPT = 8  # tokens
Sizes = Mapping[str, int]


def first_kernels(
    programs: Iterable[Program], limits: Sizes, act: DType, info: DeviceInfo
) -> Iterator[KernelSpec]:
    """The specialisations that the steps of a plain request with a short prompt need.

    Some come several times. Launches are pure functions of sizes, so no device is needed.
    """
    plain = [p for p in programs if p.name.endswith(".plain")]
    prompt = _with_prompt(limits, min(FIRST_PROMPT, limits["T"]), 0)
    return _kernels(plain, [_decoding(limits, 1, MIN_CONTEXT_CLASS)], [prompt], act, info)


def step_kernels(
    programs: Iterable[Program], limits: Sizes, act: DType, info: DeviceInfo
) -> Iterator[KernelSpec]:
    """The specialisations that any step needs, many of them several times.

    The next one takes no more than a millisecond, after which a thread may rest. Of steps with
    prompts some sizes are looked at; what they miss is compiled when a step needs it.
    """
    return _kernels(programs, list(_decode_sizes(limits)), list(_mixed_sizes(limits)), act, info)


def _kernels(
    programs: Iterable[Program],
    decode: list[Sizes],
    mixed: list[Sizes],
    act: DType,
    info: DeviceInfo,
) -> Iterator[KernelSpec]:
    seen = set()
    for program in programs:
        decodes = program.name.startswith("decode")
        sizes = decode if decodes else mixed
        for op in program.ops:
            key = decodes, likeness(program, op)
            if key not in seen:
                seen.add(key)
                yield from _op_kernels(program, op, sizes, act, info)


def _op_kernels(
    program: Program, op: Op, all_sizes: Iterable[Sizes], act: DType, info: DeviceInfo
) -> Iterator[KernelSpec]:
    """Specialisations of one op, many times the same."""
    bound = BoundOp(
        program, op, lambda name: _place(program, name, act), act=act, info=info, scratch=0
    )
    names: list[str] = []  # of the sizes that it looks at
    done: set[tuple[int, ...]] = set()  # their values
    for dims in all_sizes:
        if done and tuple([dims[name] for name in names]) in done:
            continue
        sizes = SizesRead(dims)
        yield from (launch.spec for launch in bound.launches(sizes))
        if new := sizes.read.keys() - set(names):
            names += new
            done.clear()
        done.add(tuple([dims[name] for name in names]))


def _place(program: Program, name: str, act: DType) -> Place | DeviceArray:
    """Anything a program names, at address 0: what a launch's kernel does not depend on."""
    if name in program.weights:
        return DeviceArray(0, program.weights[name].shape, act)
    if name in program.constants:
        return DeviceArray(0, program.constants[name].shape, DType.F32)
    b = program.buffers[name]
    if b.parent is not None:
        return _place(program, b.parent, act).columns(b.column, int(b.shape[-1]))
    return Place(0, b.shape, b.dtype or act)


def _decode_sizes(limits: Sizes) -> Iterator[Sizes]:
    """Of steps in which rows decode, with short contexts and with long ones."""
    for n in dict.fromkeys(row_bucket(n, limits["R"]) for n in range(1, limits["R"] + 1)):
        for context in {MIN_CONTEXT_CLASS, limits["C"]}:
            yield _decoding(limits, n, context)


def _decoding(limits: Sizes, n: int, context: int) -> Sizes:
    rows = {"T": n, "R": n, "R1": n + 1, "S": n, "D": n, "Q": 0}
    return {**limits, **rows, "C": context}


def _mixed_sizes(limits: Sizes) -> Iterator[Sizes]:
    """Of steps with a prompt, alone and beside rows that decode, with short and long contexts."""
    for tokens in _grid(limits["T"]):
        for decodes in {0, min(limits["R"], tokens) // 2}:
            short = _with_prompt(limits, tokens, decodes)
            yield short
            if short["C"] != limits["C"]:
                yield {**short, "C": limits["C"]}


def _with_prompt(limits: Sizes, tokens: int, decodes: int) -> Sizes:
    """Of a step of so many tokens, those of rows that decode among them, with a short context.

    The prompt may be scored, some positions at a time.
    """
    n, query = decodes + 1, size_class(tokens - decodes)
    rows = {"T": tokens, "R": n, "R1": n + 1, "S": n, "D": decodes, "Q": query}
    scored = min(tokens, limits["N"])
    return {**limits, **rows, "C": max(query, MIN_CONTEXT_CLASS), "N": scored}


def _grid(most: int) -> Iterator[int]:
    """1 to `most`, in steps that grow with the number."""
    n = 1
    while n < most:
        yield n
        n = max(n + 1, int(n * GRID))
    yield most
