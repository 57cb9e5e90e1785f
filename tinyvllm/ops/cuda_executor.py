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
from tinyvllm.driver.memory import copy_to_device, copy_to_host
from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.driver.timing import LaunchTimer
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.output_ring import OutputRing, PendingOutputs
from tinyvllm.memory.plan import Plan
from tinyvllm.memory.pool import DevicePool
from tinyvllm.memory.staging import StagingRing
from tinyvllm.ops.device_buffers import DeviceBuffers
from tinyvllm.ops.executor import (
    Dims,
    Recent,
    Report,
    follows,
    plan_program,
)
from tinyvllm.ops.launches import ProgramLaunches
from tinyvllm.ops.program import OUTPUT, Op, Program
from tinyvllm.util import DType

MAX_GRAPHS = 256  # kept ready: decode repeats its sizes
NUM_SLOTS = 8  # runs whose inputs and outputs may be on their way at once
TRACK = "compute stream"  # what traces call it
OUTPUT_SLOT_BYTES = 1 << 20  # token ids and log-probabilities; larger fetches get their own


class CudaExecutor:
    """Arena, state and inputs on the device, at addresses that never change; see `Executor`.

    `weights` are device arrays by the names of the programs' (packed) weights, and of any other
    buffer that is already on the device. `limits` are the largest sizes that a run may have;
    `plans` are the arena's for these, if at hand. All work goes to `stream`.
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
        plans: dict[str, Plan] | None = None,
    ) -> None:
        self._programs = {p.name: p for p in programs}
        self._limits = limits
        self._act, self._info, self._loader = act, info, loader
        self._pool, self._stream = pool, stream
        self._launches: dict[str, ProgramLaunches] = {}  # by program, made when it first runs
        self._timing: tuple[LaunchTimer, Report] | None = None
        self._owned = ExitStack()
        with self._owned as owned:  # after an error nothing is left
            self.buffers = DeviceBuffers(
                self._programs.values(),
                weights,
                limits,
                act=act,
                info=info,
                pool=pool,
                stream=stream,
                plans=plans,
            )
            owned.callback(self.buffers.close)
            self._staging = StagingRing(NUM_SLOTS, max(self.buffers.inputs.num_bytes, 1))
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
                for op in self.buffers.bound(p, dims, plan, arena):
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
        return self._done(p, dims, fetch)

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
        return self._values(
            self.buffers.array(p, name, dims, self.buffers.plans[program], self.buffers.arena)
        )

    def array(self, name: str) -> DeviceArray:
        """Where a state or a weight is, for as long as the executor is open."""
        return self.buffers.arrays[name]

    def write_row(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes the first elements of one row of a state, in stream order.

        For what a step's inputs are too small for. The driver takes a copy of `values` before it
        returns.
        """
        array = self.buffers.arrays[name]
        bits = np.ascontiguousarray(array.dtype.encode(values))
        row_bytes = prod(array.shape[1:]) * array.dtype.itemsize
        assert bits.nbytes <= row_bytes, (name, values.shape, array.shape)
        copy_to_device(array.ptr + row * row_bytes, bits, self._stream)

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Writes a whole state buffer (or weight): float32 or int32 values, rounded to its type.

        For start-up and tests: it waits for the copy.
        """
        self.buffers.write(name, value)

    def read_state(self, name: str) -> np.ndarray:
        """A state buffer's values as float32 or int32; waits for all work in the stream."""
        return self._values(self.buffers.arrays[name])

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

    def _send(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Packs the inputs into a staging slot and copies it to the device in one piece."""
        if not inputs:
            return
        slot = self._staging.acquire()
        layout = self.buffers.inputs
        start, end = layout.num_bytes, 0
        for name, value in inputs.items():
            offset = layout.offsets[name]
            flat = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
            slot.array[offset : offset + flat.nbytes] = flat
            start, end = min(start, offset), max(end, offset + flat.nbytes)
        if end > start:
            copy_to_device(self.buffers.input_region + start, slot.array[start:end], self._stream)
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
        return self._done(p, dims, fetch)

    def _done(self, p: Program, dims: Dims, fetch: tuple[str, ...]) -> PendingOutputs:
        """Queues the copies of outputs of a program whose launches are queued."""
        self.buffers.previous = p, dims
        return self._fetch(p, dims, self.buffers.plans[p.name], self.buffers.arena, fetch)

    def _launches_of(self, p: Program) -> ProgramLaunches:
        """The launches of a program in the executor's arena."""
        found = self._launches.get(p.name)
        if found is None:
            plan = self.buffers.plans[p.name]
            ops = self.buffers.bound(p, self._limits, plan, self.buffers.arena)
            found = self._launches[p.name] = ProgramLaunches(p, ops, self._loader, self._stream)
        return found

    def _fetch(
        self, p: Program, dims: Dims, plan: Plan, arena: int, names: tuple[str, ...]
    ) -> PendingOutputs:
        """Queues the copies of outputs to a slot of the output ring."""
        arrays = {n: self.buffers.array(p, n, dims, plan, arena) for n in names}
        for name, array in arrays.items():
            assert p.buffers[name].kind == OUTPUT and array.dtype.storage.itemsize == 4
        return self._outputs.fetch(arrays, self._stream)
