"""Runs a small program on either executor and compares results by a low-precision twin."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.numpy_executor import NumpyExecutor
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program, concrete
from tinyvllm.util import DType

Arrays = Mapping[str, np.ndarray]

# Units in the last place of a rounded value, relative to it: half the spacing of the type.
EPSILON = {DType.BF16: 2.0**-8, DType.FP16: 2.0**-11, DType.F32: 2.0**-24}


def outputs_of(program: Program) -> tuple[str, ...]:
    return tuple(b.name for b in program.of_kind(OUTPUT))


def pick(program: Program, arrays: Arrays, *kinds: str) -> dict[str, np.ndarray]:
    """Of `arrays`, those that are buffers of these kinds."""
    return {b.name: arrays[b.name] for b in program.of_kind(*kinds)}


def run_numpy(
    program: Program,
    dims: Mapping[str, int],
    arrays: Arrays,
    round_to: DType | None = None,
    poison: bool = True,
) -> dict[str, np.ndarray]:
    """Outputs (and states afterwards) of a program on the NumPy executor.

    `arrays` gives inputs, states and weights (by the checkpoint's names) as float32 or int32.
    """
    states = {n: a.copy() for n, a in pick(program, arrays, STATE).items()}
    executor = NumpyExecutor([program], arrays, states, dims, poison=poison, round_to=round_to)
    result = executor.run(program.name, dims, pick(program, arrays, INPUT), outputs_of(program))
    return result.get() | states


def pack(weight, arrays: Arrays) -> np.ndarray:
    """A packed weight from the checkpoint's tensors."""
    parts = [arrays[name] for name in weight.parts]
    if not weight.interleave:
        return np.concatenate(parts)
    g = weight.interleave
    groups = [part.reshape(-1, g, *part.shape[1:]) for part in parts]
    return np.stack(groups, axis=1).reshape(weight.shape)


def run_cuda(
    device,
    program: Program,
    dims: Mapping[str, int],
    arrays: Arrays,
    act: DType = DType.BF16,
    limits: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Outputs (and states afterwards) of a program on the GPU, as float32 or int32.

    Inputs are rounded to `act` where they are activations. The arena starts as NaN, and what lies
    behind the outputs' valid part must still be NaN afterwards: give `limits` above `dims`.
    """
    from tinyvllm.driver.device import Stream
    from tinyvllm.driver.kernel import KernelLoader
    from tinyvllm.driver.memory import copy_to_device, copy_to_host, memset
    from tinyvllm.memory.pool import DevicePool
    from tinyvllm.ops.cuda_executor import CudaExecutor

    limits = {**dims, **(limits or {})}
    stream, loader = Stream(), KernelLoader(device)
    pool = DevicePool(device, 8 << 30)
    weights, held = {}, []

    def upload(values: np.ndarray, dtype: DType) -> DeviceArray:
        bits = np.ascontiguousarray(dtype.encode(values))
        ptr = pool.alloc(max(bits.nbytes, 1), stream)
        held.append(ptr)
        copy_to_device(ptr, bits, stream)
        stream.synchronize()
        return DeviceArray(ptr, values.shape, dtype)

    # An activation given as an input travels as a weight does: the input region holds only the
    # engine's int32 inputs.
    for weight in program.weights.values():
        weights[weight.name] = upload(pack(weight, arrays), act)
    inputs = {}
    for b in program.of_kind(INPUT):
        if b.dtype is DType.I32:
            inputs[b.name] = arrays[b.name]
        else:
            weights[b.name] = upload(arrays[b.name], b.dtype or act)
    executor = CudaExecutor(
        [program],
        weights,
        limits,
        act=act,
        info=device.info,
        pool=pool,
        loader=loader,
        stream=stream,
    )
    try:
        for name, value in pick(program, arrays, STATE).items():
            executor.write_state(name, value)
        memset(executor.buffers.arena, 0xFF, executor.buffers.arena_bytes, stream)
        executor.run(program.name, dims, inputs, ()).get()
        plan = executor.buffers.plans[program.name]
        results = {}
        for b in program.of_kind(OUTPUT):
            dtype = b.dtype or act
            shape, full = concrete(b.shape, {**limits, **dims}), concrete(b.shape, limits)
            bits = np.empty(int(np.prod(full)), dtype.storage)
            copy_to_host(bits, executor.buffers.arena + plan.offsets[b.name], stream)
            stream.synchronize()
            size = int(np.prod(shape))
            assert (bits[size:].view(np.uint8) == 0xFF).all(), f"{b.name}: written past its end"
            results[b.name] = dtype.decode(bits[:size]).reshape(shape)
        return results | {n: executor.read_state(n) for n in pick(program, arrays, STATE)}
    finally:
        executor.close()
        for ptr in held:
            pool.free(ptr, stream)
        stream.synchronize()
        loader.close()
        pool.close()
        stream.close()


def assert_close_to_twin(
    actual: np.ndarray, reference: np.ndarray, twin: np.ndarray, act: DType
) -> None:
    """The kernel's error must be at most twice that of the same maths rounded to `act` after
    every op, plus the rounding of the output itself."""
    assert actual.shape == reference.shape
    assert np.isfinite(actual).all(), "the kernel's output is not finite"
    scale = np.abs(reference).max(initial=0.0)
    allowed = 2 * np.abs(twin - reference).max(initial=0.0) + EPSILON[act] * scale
    error = np.abs(actual - reference).max(initial=0.0)
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e} (values up to {scale:.3e})"


def check_cuda(
    device,
    program: Program,
    lowered: Program,
    dims: Mapping[str, int],
    arrays: Arrays,
    act: DType = DType.BF16,
    limits: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Compares the lowered program on the GPU with the primitive one on NumPy, float outputs by
    the twin and int32 outputs exactly; returns the GPU's results."""
    rounded = {
        n: a if a.dtype == np.int32 or _is_f32(program, n) else act.round(a)
        for n, a in arrays.items()
    }
    reference = run_numpy(program, dims, rounded)
    twin = run_numpy(program, dims, rounded, round_to=act)
    actual = run_cuda(device, lowered, dims, rounded, act, limits)
    for name in outputs_of(program):
        if actual[name].dtype == np.int32:
            np.testing.assert_array_equal(actual[name], reference[name], err_msg=name)
        else:
            assert_close_to_twin(actual[name], reference[name], twin[name], act)
    return actual


def _is_f32(program: Program, name: str) -> bool:
    return name in program.buffers and program.buffers[name].dtype is DType.F32
