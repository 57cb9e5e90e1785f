"""Where the buffers of programs lie on the device: states, inputs and the arena."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import numpy as np

from tinyvllm.driver.device import Stream
from tinyvllm.driver.memory import copy_to_device, memset
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.plan import Plan
from tinyvllm.memory.pool import DevicePool
from tinyvllm.ops.executor import Dims, InputLayout, arena_plans, scratch_name
from tinyvllm.ops.launches import BoundOp, Place
from tinyvllm.ops.program import EXTERNAL, INPUT, STATE, Program, concrete
from tinyvllm.util import DType


class DeviceBuffers:
    """Allocations for programs of up to `limits`, at addresses that never change.

    arrays: states and constants, and the arrays that were on the device before, by name.
    plans: of the programs that run in `arena` (`arena_plans`; made here unless they are given);
        those that follow others get arenas of their own.
    inputs: where each input lies from `input_region` on.
    previous: the program that ran last in `arena`, and its sizes: what follows it reads its
        buffers.
    """

    def __init__(
        self,
        programs: Iterable[Program],
        arrays: Mapping[str, DeviceArray],
        limits: Dims,
        *,
        act: DType,
        info: DeviceInfo,
        pool: DevicePool,
        stream: Stream,
        plans: dict[str, Plan] | None = None,
    ) -> None:
        programs = list(programs)
        self._limits, self._act, self._info = limits, act, info
        self._pool, self._stream = pool, stream
        self.arrays = dict(arrays)
        self.plans = arena_plans(programs, limits, act, info) if plans is None else plans
        self.arena_bytes = max(plan.arena_bytes for plan in self.plans.values())
        buffers = {
            b.name: b for p in programs for b in p.of_kind(INPUT) if b.name not in self.arrays
        }
        self.inputs = InputLayout.of(list(buffers.values()), limits)
        self.previous: tuple[Program, Dims] | None = None
        self._owned = ExitStack()
        with self._owned as owned:  # after an error nothing is left
            self.arena = self._alloc(self.arena_bytes)
            self._new_states(programs)
            self.input_region = self._alloc(self.inputs.num_bytes)
            self._owned = owned.pop_all()

    def bound(self, p: Program, room: Dims, plan: Plan, arena: int) -> list[BoundOp]:
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

    def array(self, p: Program, name: str, dims: Dims, plan: Plan, arena: int) -> DeviceArray:
        """An array of a program in a run of these sizes, in the arena that it ran in."""
        room = self._limits if arena == self.arena else dims
        place = self._place(p, name, room, plan, arena)
        return place.array(dims) if isinstance(place, Place) else place

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes a whole array: float32 or int32 values, rounded to its type; waits for that."""
        array = self.arrays[name]
        assert value.shape == array.shape, (name, value.shape, array.shape)
        copy_to_device(array.ptr, np.ascontiguousarray(array.dtype.encode(value)), self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        """Frees all of it, in stream order."""
        self._owned.close()

    def _alloc(self, num_bytes: int) -> int:
        """An allocation that lives as long as this object."""
        ptr = self._pool.alloc(max(num_bytes, 1), self._stream)
        self._owned.callback(self._pool.free, ptr, self._stream)
        return ptr

    def _new_states(self, programs: Iterable[Program]) -> None:
        """States, all zero, and constants, unless they are on the device already."""
        for p in programs:
            for b in p.of_kind(STATE):
                if b.name not in self.arrays:
                    shape = concrete(b.shape, self._limits)
                    self.arrays[b.name] = self._new_array(shape, b.dtype)
            for name, value in p.constants.items():
                if name not in self.arrays:
                    self.arrays[name] = self._new_array(value.shape, DType.F32)
                    self.write(name, value)

    def _new_array(self, shape: tuple[int, ...], dtype: DType | None) -> DeviceArray:
        array = DeviceArray(0, shape, dtype or self._act)
        ptr = self._alloc(array.nbytes)
        memset(ptr, 0, array.nbytes, self._stream)
        return DeviceArray(ptr, shape, dtype or self._act)

    def _place(
        self, p: Program, name: str, room: Dims, plan: Plan, arena: int
    ) -> Place | DeviceArray:
        """Where a buffer or weight is; all of it where that does not depend on a run's sizes."""
        if name in self.arrays:
            return self.arrays[name]
        b = p.buffers[name]
        if b.parent is not None:
            parent = self._place(p, b.parent, room, plan, arena)
            return parent.columns(b.column, int(b.shape[-1]))
        if b.kind == EXTERNAL:
            assert self.previous is not None, f"{p.name} runs after another program"
            before, dims = self.previous
            place = self._place(before, name, self._limits, self.plans[before.name], self.arena)
            return place.array(dims) if isinstance(place, Place) else place
        base = (
            self.input_region + self.inputs.offsets[name]
            if b.kind == INPUT
            else (arena + plan.offsets[name])
        )
        return Place(base, b.shape, b.dtype or self._act, max_rows=concrete(b.shape[:1], room)[0])
