"""One launch run several times with other addresses: what layers that are alike ask for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.driver.calls import CudaError, call
from tinyvllm.driver.device import Stream
from tinyvllm.driver.kernel import KernelLoader, bad_argument, describe, launch_config
from tinyvllm.driver.spec import Launch, TensorMap
from tinyvllm.driver.tensor_map import encode
from tinyvllm.util import InputError

Moves = Sequence[Sequence[int]]


def moved(first: Launch, other: Launch) -> list[int] | None:
    """What to add to each argument of `first` to get those of `other`; of a tensor map, to its
    address. None if they differ in more than that, or in numbers that are no integers."""
    if replace(first, args=()) != replace(other, args=()):
        return None
    moves = []
    for a, b in zip(first.args, other.args, strict=True):
        if isinstance(a, TensorMap):
            if replace(a, ptr=b.ptr) != b:
                return None
            moves.append(b.ptr - a.ptr)
        elif isinstance(a, float) or isinstance(b, float):
            if a != b:
                return None
            moves.append(0)
        else:
            moves.append(b - a)
    return moves


class RepeatedLaunch:
    """Launches of one kernel that differ by the same `moves` whatever their common arguments are.

    `moves` has a row for each of them: what is added to the arguments that `set` packs (of a
    tensor map, to its address). To set all of them costs little more than to set one, so that a
    program's launches can follow sizes that are other ones in each step.
    """

    def __init__(self, loader: KernelLoader, launch: Launch, moves: Moves) -> None:
        self._loader = loader
        kernel = loader.kernel(launch)
        params, offsets = launch.spec.kernel.params, kernel.offsets
        count = len(params)
        num_words = kernel.packer.size // 8
        # As in a PreparedLaunch: pointers to the values, then the values, a row for each launch.
        self._block = np.zeros((len(moves), count + num_words), np.uint64)
        self._rows = [row.ctypes.data for row in self._block]
        for row, address in zip(self._block, self._rows, strict=True):
            row[:count] = [address + 8 * count + offset for offset in offsets]
        self._values = self._block[:, count:]
        self._moves = np.zeros((len(moves), num_words), np.uint64)
        self._map_moves: dict[int, list[int]] = {}  # by argument: tensor maps that do move
        self._maps: dict[tuple[int, TensorMap], np.ndarray] = {}  # their encodings, by the first
        for i, ((kind, _), offset) in enumerate(zip(params, offsets, strict=True)):
            column = [row[i] for row in moves]
            if kind != "map":
                self._moves[:, offset // 8] = [move % (1 << 64) for move in column]
            elif any(column):
                self._map_moves[i] = column
        self._start = 8 * count
        self._offsets = offsets
        self._launch: Launch | None = None
        self._config: Any = None
        self._function: Any = None

    def set(self, launch: Launch, stream: Stream) -> None:
        """Makes the launches ready to run in `stream`: `launch` is the one that moves by 0.

        Raises InputError as `KernelLoader.prepare` does.
        """
        before = self._launch
        kernel = self._loader.kernel(launch)
        args = [encode(arg) if isinstance(arg, TensorMap) else arg for arg in launch.args]
        try:
            kernel.packer.pack_into(self._block.data, self._start, *args)
        except struct.error as error:
            raise InputError(f"{describe(launch)}: {bad_argument(launch, error)}") from None
        np.add(self._values[0], self._moves, out=self._values)
        for i, column in self._map_moves.items():
            word = self._offsets[i] // 8
            self._values[:, word : word + 16] = self._encoded(i, launch.args[i], column)
        if before is None or (before.cluster, before.pdl) != (launch.cluster, launch.pdl):
            self._config = launch_config(launch, launch.pdl and self._loader.pdl)
        else:
            config = self._config
            config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
            config.blockDimX, config.sharedMemBytes = launch.block, launch.smem
        self._config.hStream = stream.handle
        self._launch, self._function = launch, kernel.function

    def run(self, index: int) -> None:
        """Runs one of the launches; the driver copies its arguments before it returns."""
        try:
            call("cuLaunchKernelEx", self._config, self._function, self._rows[index], 0)
        except CudaError as error:
            assert self._launch is not None
            raise error.with_detail(describe(self._launch)) from None

    def _encoded(self, i: int, first: TensorMap, column: list[int]) -> np.ndarray:
        """uint64 words [launches, 16] of argument `i`, a tensor map that moves."""
        found = self._maps.get((i, first))
        if found is None:
            images = [encode(replace(first, ptr=first.ptr + move)) for move in column]
            found = np.frombuffer(b"".join(images), np.uint64).reshape(len(column), 16)
            self._maps[i, first] = found
        return found
