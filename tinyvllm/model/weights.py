"""Weights, of a checkpoint or random, to where executors want them: checked, packed, converted."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from math import prod

import numpy as np

from tinyvllm.driver.spec import Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.plan import ALIGNMENT
from tinyvllm.memory.upload import SLOT_BYTES, CopyJob
from tinyvllm.model.presets import DummySource
from tinyvllm.model.source import TensorSource
from tinyvllm.ops.program import Program, Weight
from tinyvllm.ops.random_fill import fill_launches
from tinyvllm.progress import Progress
from tinyvllm.util import DType, InputError, align_up

# Tensors that checkpoints carry and no program reads: RoPE is computed from the configuration.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def check_weights(source: TensorSource, program: Program, where: str) -> None:
    """InputError unless the checkpoint has exactly the weights of the (primitive) program.

    A tied checkpoint may repeat its embedding as lm_head.weight.
    """
    present = set(source.names())
    wanted = program.weights
    allowed = {"lm_head.weight"} if "lm_head.weight" not in wanted else set()
    missing = sorted(wanted.keys() - present)
    extra = sorted(n for n in present - wanted.keys() - allowed if not n.endswith(IGNORED_SUFFIXES))
    wrong = [
        f"{n} has shape {list(source.shape(n))}, must be {list(w.shape)}"
        for n, w in wanted.items()
        if n in present and tuple(source.shape(n)) != w.shape
    ]
    problems = [f"{n} is missing" for n in missing] + wrong
    problems += [f"{n} is not part of this architecture" for n in extra]
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(
            f"{where}: the tensors do not fit the model's configuration: {shown}{more}"
        )


def load_numpy(source: TensorSource, program: Program, dtype: DType) -> dict[str, np.ndarray]:
    """float32 arrays by name, their values rounded to `dtype`: what the NumPy executor takes."""
    arrays = {}
    total = sum(prod(weight.shape) for weight in program.weights.values()) * dtype.itemsize
    with Progress(total, "Loading weights", "B") as bar:
        for name, weight in program.weights.items():
            bits = np.empty(prod(weight.shape), dtype.storage)
            source.read(name, dtype, bits)
            arrays[name] = dtype.decode(bits).reshape(weight.shape)
            bar.update(bits.nbytes)
    return arrays


def packed_weights(programs: Iterable[Program]) -> dict[str, Weight]:
    """Every (packed) weight that lowered programs read; they share the ones of equal name."""
    weights: dict[str, Weight] = {}
    for program in programs:
        for name, weight in program.weights.items():
            assert weights.setdefault(name, weight) == weight, f"{name} is packed in two ways"
    return weights


def place_weights(
    weights: dict[str, Weight], dtype: DType, base: int = 0
) -> tuple[dict[str, DeviceArray], int]:
    """Device arrays for weights laid one after another from address `base`, and their bytes."""
    arrays, end = {}, 0
    for name, weight in weights.items():
        arrays[name] = DeviceArray(base + end, weight.shape, dtype)
        end += align_up(arrays[name].nbytes, ALIGNMENT)
    return arrays, end


def parts_of(weight: Weight, array: DeviceArray, rows: list[int]) -> Iterator[DeviceArray]:
    """Where each part of a packed weight starts. An interleaved part begins `interleave` rows
    after the one before it, a stacked part behind the whole of it; `rows` are their heights."""
    row_bytes = prod(weight.shape[1:]) * array.dtype.itemsize
    start = 0
    for count in rows:
        yield DeviceArray(array.ptr + start * row_bytes, (count, *weight.shape[1:]), array.dtype)
        start += weight.interleave or count


def copy_jobs(
    source: TensorSource, weights: dict[str, Weight], arrays: dict[str, DeviceArray]
) -> Iterator[CopyJob]:
    """The pieces in which the uploader brings all weights to their places.

    Stacked parts are contiguous on both sides; interleaved ones are scattered by the copy engine
    in groups of rows, so the host never rearranges anything.
    """
    for name, weight in weights.items():
        array = arrays[name]
        shapes = [source.shape(part) for part in weight.parts]
        places = parts_of(weight, array, [s[0] for s in shapes])
        for part, shape, place in zip(weight.parts, shapes, places, strict=True):
            row_size = prod(shape[1:])
            unit = weight.interleave or 1  # rows that stay together
            step = max(1, SLOT_BYTES // (row_size * unit * array.dtype.itemsize)) * unit
            unit_bytes = unit * row_size * array.dtype.itemsize
            pitch = unit_bytes * (len(weight.parts) if weight.interleave else 1)
            for first in range(0, shape[0], step):
                count = min(step, shape[0] - first)
                yield CopyJob(
                    functools.partial(_fill, source, part, array.dtype, first * row_size),
                    count * row_size * array.dtype.itemsize,
                    place.ptr + first // unit * pitch,
                    unit_bytes,
                    pitch,
                )


def dummy_launches(
    source: DummySource, packed: dict[str, Weight], arrays: dict[str, DeviceArray]
) -> list[Launch]:
    """Launches that make dummy weights in place."""
    launches = []
    for name, weight in packed.items():
        shapes = [source.shape(part) for part in weight.parts]
        array = arrays[name]
        places = parts_of(weight, array, [s[0] for s in shapes])
        for i, (part, shape, place) in enumerate(zip(weight.parts, shapes, places, strict=True)):
            key, base, scale = source.rule(part)
            interleaved = weight.interleave > 0
            launches += fill_launches(
                array.ptr if interleaved else place.ptr,
                array.dtype,
                key=key,
                base=base,
                scale=scale,
                num_rows=shape[0],
                row_len=prod(shape[1:]),
                group=weight.interleave,
                num_parts=len(shapes) if interleaved else 1,
                part=i if interleaved else 0,
            )
    return launches


def _fill(source: TensorSource, name: str, dtype: DType, start: int, out: np.ndarray) -> None:
    source.read(name, dtype, out.view(dtype.storage), start)
