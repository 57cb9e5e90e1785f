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
    follows,
    plan_program,
    scratch_name,
)
from tinyvllm.ops.launches import BoundOp, Place, ProgramLaunches
from tinyvllm.ops.program import EXTERNAL, INPUT, OUTPUT, STATE, Op, Program, concrete
from tinyvllm.util import DType

MAX_GRAPHS = 256  # kept ready: decode repeats its sizes
NUM_SLOTS = 8  # runs whose inputs and outputs may be on their way at once
TRACK = "compute stream"  # what traces call it
OUTPUT_SLOT_BYTES = 1 << 20  # token ids and log-probabilities; larger fetches get their own


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
        self._launches: dict[str, ProgramLaunches] = {}  # by program, made when it first runs
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
            self._graphs = Recent[GraphExec](MAX_GRAPHS, lambda graph: graph.close())
            owned.callback(self._graphs.clear)
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
                for op in self._bound(p, dims, plan, arena):
                    self.launch(op.launches(dims))
                return self._fetch(p, dims, plan, arena, fetch)
            finally:
                self._pool.free(arena, self._stream)
        if self._timing is not None:
            return self._run_timed(p, sizes, dims, fetch)
        if graph:
            key = (program, *dims.values())
            ready = self._graphs.get(key)
            if ready is None:
                ready = self._capture(p, dims)
                self._graphs.put(key, ready)
            ready.run(self._stream)
        else:
            self._launches_of(p).run(dims)
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
        dims = {**self._limits, **dims}
        ops = self._launches_of(self._programs[program]).ops
        return [(bound.op, self.prepare(bound.launches(dims))) for bound in ops]

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

    def _capture(self, p: Program, dims: Dims) -> GraphExec:
        """A program's launches as one graph: a decode step then costs the host one call."""
        launches = self._launches_of(p)
        launches.prepare(dims)  # no kernel is loaded while the stream is captured
        with phase("capture"):
            with capture(self._stream) as graph:
                launches.run(dims)
            with graph:
                return graph.instantiate()

    def _run_timed(
        self, p: Program, sizes: Dims, dims: Dims, fetch: tuple[str, ...]
    ) -> PendingOutputs:
        """Runs a program launch by launch and reports the times; `sizes` are those to report."""
        assert self._timing is not None
        timer, report = self._timing
        by_op = self.launches_by_op(p.name, dims)
        launches = [launch for _, launches in by_op for launch in launches]
        report(TRACK, *timer.run(p.name, sizes, launches, self._loader, self._stream))
        self._previous = p, dims
        return self._fetch(p, dims, self.plans[p.name], self.arena, fetch)

    def _launches_of(self, p: Program) -> ProgramLaunches:
        """The launches of a program in the executor's arena."""
        found = self._launches.get(p.name)
        if found is None:
            ops = self._bound(p, self._limits, self.plans[p.name], self.arena)
            found = self._launches[p.name] = ProgramLaunches(p, ops, self._loader, self._stream)
        return found

    def _bound(self, p: Program, room: Dims, plan: Plan, arena: int) -> list[BoundOp]:
        """The ops of a program whose buffers lie in an arena with room for such sizes."""
        return [
            BoundOp(
                p,
                op,
                lambda name: self._place(p, name, room, plan, arena),
                act=self._act,
                info=self._info,
                scratch=arena + plan.offsets.get(scratch_name(i), 0),
            )
            for i, op in enumerate(p.ops)
        ]

    def _place(
        self, p: Program, name: str, room: Dims, plan: Plan, arena: int
    ) -> Place | DeviceArray:
        """Where a buffer or weight is; all of it where that does not depend on a run's sizes."""
        if name in self._arrays:
            return self._arrays[name]
        b = p.buffers[name]
        if b.parent is not None:
            parent = self._place(p, b.parent, room, plan, arena)
            return parent.columns(b.column, int(b.shape[-1]))
        if b.kind == EXTERNAL:
            assert self._previous is not None, f"{p.name} runs after another program"
            before, dims = self._previous
            place = self._place(before, name, self._limits, self.plans[before.name], self.arena)
            return place.array(dims) if isinstance(place, Place) else place
        base = (
            self._input_region + self._inputs.offsets[name]
            if b.kind == INPUT
            else (arena + plan.offsets[name])
        )
        return Place(base, b.shape, b.dtype or self._act, max_rows=concrete(b.shape[:1], room)[0])

    def _array(self, p: Program, name: str, dims: Dims, plan: Plan, arena: int) -> DeviceArray:
        room = self._limits if arena == self.arena else dims
        place = self._place(p, name, room, plan, arena)
        return place.array(dims) if isinstance(place, Place) else place

    def _fetch(
        self, p: Program, dims: Dims, plan: Plan, arena: int, names: tuple[str, ...]
    ) -> PendingOutputs:
        """Queues the copies of outputs to a slot of the output ring."""
        arrays = {n: self._array(p, n, dims, plan, arena) for n in names}
        for name, array in arrays.items():
            assert p.buffers[name].kind == OUTPUT and array.dtype.storage.itemsize == 4
        return self._outputs.fetch(arrays, self._stream)
