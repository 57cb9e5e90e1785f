"""Runs lowered programs on the GPU: resolves addresses, copies inputs, launches kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from math import prod

import numpy as np

from tinyvllm.driver.calls import phase
from tinyvllm.driver.device import Stream
from tinyvllm.driver.graph import GraphExec, capture
from tinyvllm.driver.kernel import KernelLoader, PreparedLaunch
from tinyvllm.driver.memory import copy_to_device, copy_to_host, memset
from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.driver.timing import LaunchTimer
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.output_ring import OutputRing, PendingOutputs
from tinyvllm.memory.plan import Plan
from tinyvllm.memory.pool import DevicePool
from tinyvllm.memory.staging import StagingRing
from tinyvllm.ops.executor import (
    Dims,
    InputLayout,
    Recent,
    Report,
    bind,
    follows,
    plan_program,
    scratch_name,
    writes_nothing,
)
from tinyvllm.ops.program import EXTERNAL, INPUT, OUTPUT, STATE, Op, Program, concrete
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType

MAX_PREPARED = 128  # runs kept ready, as packed launches or as a graph: decode repeats its sizes
NUM_SLOTS = 8  # runs whose inputs and outputs may be on their way at once
TRACK = "compute stream"  # what traces call it
OUTPUT_SLOT_BYTES = 1 << 20  # token ids and log-probabilities; larger fetches get their own


class _LaunchList:
    """Launches that run one after the other, each a call of the driver."""

    def __init__(self, launches: list[PreparedLaunch]) -> None:
        self._launches = launches

    def run(self, stream: Stream) -> None:
        for launch in self._launches:
            launch.run(stream)

    def close(self) -> None:
        """Nothing to free: the kernels belong to the loader."""


def _flat(by_op: list[tuple[Op, list[PreparedLaunch]]]) -> list[PreparedLaunch]:
    return [launch for _, launches in by_op for launch in launches]


class CudaExecutor:
    """Arena, state and inputs on the device, at addresses that never change; see `Executor`.

    `weights` are device arrays by the names of the programs' (packed) weights, and of any other
    buffer that is already on the device. `limits` are the largest sizes that a run may have. All
    work goes to `stream`.
    """

    def __init__(
        self,
        programs: Iterable[Program],
        weights: Mapping[str, DeviceArray],
        limits: Dims,
        *,
        act: DType,
        info: DeviceInfo,
        pool: DevicePool,
        loader: KernelLoader,
        stream: Stream,
    ) -> None:
        self._programs = {p.name: p for p in programs}
        self._limits = limits
        self._act, self._info, self._loader = act, info, loader
        self._pool, self._stream = pool, stream
        self._arrays: dict[str, DeviceArray] = dict(weights)
        self.plans: dict[str, Plan] = {
            p.name: plan_program(p, limits, act, info)
            for p in self._programs.values()
            if not follows(p)
        }
        self.arena_bytes = max(plan.arena_bytes for plan in self.plans.values())
        buffers = {
            b.name: b
            for p in self._programs.values()
            for b in p.of_kind(INPUT)
            if b.name not in self._arrays
        }
        self._inputs = InputLayout.of(list(buffers.values()), limits)
        self._previous: tuple[Program, Dims] | None = None
        self._timing: tuple[LaunchTimer, Report] | None = None
        self._owned = ExitStack()
        with self._owned as owned:  # after an error nothing is left
            self.arena = self._alloc(self.arena_bytes)
            self._new_states()
            self._input_region = self._alloc(self._inputs.num_bytes)
            self._staging = StagingRing(NUM_SLOTS, max(self._inputs.num_bytes, 1))
            owned.callback(self._staging.close)
            self._outputs = OutputRing(NUM_SLOTS, OUTPUT_SLOT_BYTES)
            owned.callback(self._outputs.close)
            self._prepared = Recent[_LaunchList | GraphExec](MAX_PREPARED, lambda run: run.close())
            owned.callback(self._prepared.clear)
            self._owned = owned.pop_all()

    @property
    def waited(self) -> float:
        """Seconds that the host has spent waiting for results."""
        return self._outputs.waited

    def run(
        self,
        program: str,
        dims: Dims,
        inputs: Mapping[str, np.ndarray],
        fetch: tuple[str, ...],
        graph: bool = False,
    ) -> PendingOutputs:
        """Queues a program with its copies and returns at once; see `Executor.run`."""
        p, sizes = self._programs[program], dims
        dims = {**self._limits, **dims}
        self._send(inputs)
        if follows(p):
            # Sizes differ from step to step, so this arena lives in stream order.
            plan = plan_program(p, dims, self._act, self._info)
            arena = self._pool.alloc(plan.arena_bytes, self._stream)
            try:
                _LaunchList(_flat(self._prepare(p, dims, plan, arena))).run(self._stream)
                return self._fetch(p, dims, plan, arena, fetch)
            finally:
                self._pool.free(arena, self._stream)
        if self._timing is not None:
            return self._run_timed(p, sizes, dims, fetch)
        key = (program, graph, *dims.values())
        ready = self._prepared.get(key)
        if ready is None:
            launches = _flat(self._prepare(p, dims, self.plans[program], self.arena))
            ready = self._capture(launches) if graph else _LaunchList(launches)
            self._prepared.put(key, ready)
        ready.run(self._stream)
        self._previous = p, dims
        return self._fetch(p, dims, self.plans[program], self.arena, fetch)

    @property
    def stream(self) -> Stream:
        """Where all work goes."""
        return self._stream

    def launches_by_op(self, program: str, dims: Dims) -> list[tuple[Op, list[PreparedLaunch]]]:
        """The launches of a program at these sizes, ready to run, op by op: for benchmarks.

        What they compute depends on the inputs and states that an earlier `run` has left.
        """
        p, dims = self._programs[program], {**self._limits, **dims}
        return self._prepare(p, dims, self.plans[program], self.arena)

    def launch(self, launches: Iterable[Launch]) -> None:
        """Runs launches that belong to no program, in stream order."""
        for launch in self.prepare(launches):
            launch.run(self._stream)

    def prepare(self, launches: Iterable[Launch]) -> list[PreparedLaunch]:
        """Launches that belong to no program, ready to run."""
        return [self._loader.prepare(launch) for launch in launches]

    def read(self, program: str, dims: Dims, name: str) -> np.ndarray:
        """The values of a buffer or weight of a program at these sizes, as float32 or int32.

        For tests and benchmarks: it waits for all work in the stream.
        """
        p, dims = self._programs[program], {**self._limits, **dims}
        return self._values(self._array(p, name, dims, self.plans[program], self.arena))

    def array(self, name: str) -> DeviceArray:
        """Where a state or a weight is, for as long as the executor is open."""
        return self._arrays[name]

    def write_row(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes the first elements of one row of a state, in stream order.

        For what a step's inputs are too small for. The driver takes a copy of `values` before it
        returns.
        """
        array = self._arrays[name]
        bits = np.ascontiguousarray(array.dtype.encode(values))
        row_bytes = prod(array.shape[1:]) * array.dtype.itemsize
        assert bits.nbytes <= row_bytes, (name, values.shape, array.shape)
        copy_to_device(array.ptr + row * row_bytes, bits, self._stream)

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Writes a whole state buffer (or weight): float32 or int32 values, rounded to its type.

        For start-up and tests: it waits for the copy.
        """
        array = self._arrays[name]
        assert value.shape == array.shape, (name, value.shape, array.shape)
        copy_to_device(array.ptr, np.ascontiguousarray(array.dtype.encode(value)), self._stream)
        self._stream.synchronize()

    def read_state(self, name: str) -> np.ndarray:
        """A state buffer's values as float32 or int32; waits for all work in the stream."""
        return self._values(self._arrays[name])

    def _values(self, array: DeviceArray) -> np.ndarray:
        assert array.contiguous, array
        bits = np.empty(array.shape, array.dtype.storage)
        copy_to_host(bits, array.ptr, self._stream)
        self._stream.synchronize()
        return array.dtype.decode(bits)

    def report_times(self, report: Report | None) -> None:
        """Reports the device's time of each launch; see `Executor.report_times`."""
        if self._timing is not None:
            self._timing[0].close()
        self._timing = None if report is None else (LaunchTimer(), report)

    def close(self) -> None:
        """Waits for the stream and frees everything."""
        self._stream.synchronize()
        self.report_times(None)
        self._owned.close()

    def _alloc(self, num_bytes: int) -> int:
        """An allocation that lives as long as the executor."""
        ptr = self._pool.alloc(max(num_bytes, 1), self._stream)
        self._owned.callback(self._pool.free, ptr, self._stream)
        return ptr

    def _new_states(self) -> None:
        """States, all zero, and constants, unless they are on the device already."""
        for p in self._programs.values():
            for b in p.of_kind(STATE):
                if b.name not in self._arrays:
                    shape = concrete(b.shape, self._limits)
                    self._arrays[b.name] = self._new_array(shape, b.dtype)
            for name, value in p.constants.items():
                if name not in self._arrays:
                    self._arrays[name] = self._new_array(value.shape, DType.F32)
                    self.write_state(name, value)

    def _new_array(self, shape: tuple[int, ...], dtype: DType | None) -> DeviceArray:
        array = DeviceArray(0, shape, dtype or self._act)
        ptr = self._alloc(array.nbytes)
        memset(ptr, 0, array.nbytes, self._stream)
        return DeviceArray(ptr, shape, dtype or self._act)

    def _send(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Packs the inputs into a staging slot and copies it to the device in one piece."""
        if not inputs:
            return
        slot = self._staging.acquire()
        start, end = self._inputs.num_bytes, 0
        for name, value in inputs.items():
            offset = self._inputs.offsets[name]
            flat = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
            slot.array[offset : offset + flat.nbytes] = flat
            start, end = min(start, offset), max(end, offset + flat.nbytes)
        if end > start:
            copy_to_device(self._input_region + start, slot.array[start:end], self._stream)
        self._staging.release(slot, self._stream)

    def _capture(self, launches: list[PreparedLaunch]) -> GraphExec:
        """The launches as one graph: a decode step then costs the host one call."""
        with phase("capture"):
            with capture(self._stream) as graph:
                _LaunchList(launches).run(self._stream)
            with graph:
                return graph.instantiate()

    def _run_timed(
        self, p: Program, sizes: Dims, dims: Dims, fetch: tuple[str, ...]
    ) -> PendingOutputs:
        """Runs a program launch by launch and reports the times; `sizes` are those to report."""
        assert self._timing is not None
        timer, report = self._timing
        launches = _flat(self._prepare(p, dims, self.plans[p.name], self.arena))
        report(TRACK, *timer.run(p.name, sizes, launches, self._loader, self._stream))
        self._previous = p, dims
        return self._fetch(p, dims, self.plans[p.name], self.arena, fetch)

    def _prepare(
        self, p: Program, dims: Dims, plan: Plan, arena: int
    ) -> list[tuple[Op, list[PreparedLaunch]]]:
        by_op: list[tuple[Op, list[Launch]]] = []
        for i, op in enumerate(p.ops):
            if writes_nothing(p, op, dims):
                continue
            operands = bind(
                op,
                dims,
                self._act,
                lambda name: self._array(p, name, dims, plan, arena),
                arena + plan.offsets.get(scratch_name(i), 0),
            )
            by_op.append((op, op_def(op.kind).launches(operands, self._info)))
        self._loader.load_all({launch.spec for _, launches in by_op for launch in launches})
        return [(op, [self._loader.prepare(one) for one in launches]) for op, launches in by_op]

    def _array(self, p: Program, name: str, dims: Dims, plan: Plan, arena: int) -> DeviceArray:
        if name in self._arrays:
            return self._arrays[name]
        b = p.buffers[name]
        if b.parent is not None:
            parent = self._array(p, b.parent, dims, plan, arena)
            return parent.columns(b.column, int(b.shape[-1]))
        if b.kind == EXTERNAL:
            assert self._previous is not None, f"{p.name} runs after another program"
            before, before_dims = self._previous
            return self._array(before, name, before_dims, self.plans[before.name], self.arena)
        base = (
            self._input_region + self._inputs.offsets[name]
            if b.kind == INPUT
            else (arena + plan.offsets[name])
        )
        # Its own arena has room for the limits; one in stream order is as large as this run needs.
        room = concrete(b.shape, self._limits if arena == self.arena else dims)
        shape = concrete(b.shape, dims)
        return DeviceArray(base, shape, b.dtype or self._act, max_rows=room[0])

    def _fetch(
        self, p: Program, dims: Dims, plan: Plan, arena: int, names: tuple[str, ...]
    ) -> PendingOutputs:
        """Queues the copies of outputs to a slot of the output ring."""
        arrays = {n: self._array(p, n, dims, plan, arena) for n in names}
        for name, array in arrays.items():
            assert p.buffers[name].kind == OUTPUT and array.dtype.storage.itemsize == 4
        return self._outputs.fetch(arrays, self._stream)
