"""The model on the CPU: weights and states as NumPy arrays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tinyvllm.config import EngineConfig
from tinyvllm.engine.sizing import (
    engine_limits,
    engine_programs,
    model_dtype,
    plan_engine,
    swap_space,
)
from tinyvllm.memory.numpy_swapper import NumpySwapper
from tinyvllm.memory.pool import PoolStats, planned_usage
from tinyvllm.model.hub import LocalModel
from tinyvllm.model.weights import check_weights, load_numpy
from tinyvllm.ops.executor import Executor
from tinyvllm.ops.numpy_executor import NumpyExecutor
from tinyvllm.ops.program import STATE, concrete
from tinyvllm.util import DType


class CpuBackend:
    """See `Backend`; what it must wait for is done when a run returns."""

    device_name: str = "cpu"
    asynchronous: bool = False

    def __init__(self, config: EngineConfig, model: LocalModel) -> None:
        self._config, self._model = config, model
        self._programs = engine_programs(config, model.config, primitive=True)
        self.memory, self.max_model_len = plan_engine(
            config,
            model.config,
            self._programs,
            free_bytes=_host_memory(),
            act=DType.F32,
            device=None,
        )
        self.limits = engine_limits(config, self.max_model_len, self.memory.num_blocks)
        space = swap_space(config, self.memory.block_bytes)
        self.swapper = NumpySwapper(space) if space is not None else None
        self._weights: dict[str, np.ndarray] = {}  # empty: dropped, or not read yet
        self.executor: Executor
        self.wake_up()
        if self.swapper is not None and config.pin_swap_space:
            self.swapper.reserve_all()

    def enter(self) -> None:
        """Any thread may use the arrays."""

    def pool_stats(self) -> PoolStats:
        """Of a pool that is given all of the plan on waking, and has it back while asleep."""
        return planned_usage(self.memory, awake=self._awake)

    def sleep(self, level: int) -> None:
        """Drops states and arenas, at level 2 the weights too; see `Backend.sleep`."""
        self.executor.close()
        if self.swapper is not None:
            self.swapper.detach()
        self._awake = False
        if level == 2:
            self._weights = {}

    def wake_up(self) -> None:
        """Makes what `sleep` dropped; see `Backend.wake_up`."""
        weights = self._weights or self._read_weights()
        states = {
            b.name: np.zeros(
                concrete(b.shape, self.limits), b.dtype.storage if b.dtype else np.float32
            )
            for p in self._programs
            for b in p.of_kind(STATE)
        }
        self.executor = NumpyExecutor(self._programs, weights, states, self.limits)
        if self.swapper is not None:
            self.swapper.attach(states["kv_cache"])
        self._weights = weights
        self._awake = True

    def close(self) -> None:
        """Drops all arrays."""
        if self.swapper is not None:
            self.swapper.close()
        self.executor.close()
        self._weights = {}

    def _read_weights(self) -> dict[str, np.ndarray]:
        source = self._model.open_source()
        try:
            check_weights(source, self._programs[0], self._model.where)
            return load_numpy(
                source, self._programs[0], model_dtype(self._config, self._model.config)
            )
        finally:
            source.close()


def _host_memory() -> int:
    """Bytes of memory that the host can give without swapping; half of all where it won't say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
