"""`tinyvllm bench host`: Python's time for a decode step, on a device that does nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinyvllm.bench.latency import decode_times
from tinyvllm.config import EngineConfig, check_int
from tinyvllm.engine.batch import step_limits
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.memory.budget import plan_memory
from tinyvllm.memory.pool import PoolStats, planned_usage
from tinyvllm.memory.swapper import Swapper
from tinyvllm.ops.executor import Executor, Report
from tinyvllm.ops.numpy_executor import NumpyResult


def bench_host(config: EngineConfig, batches: list[int]) -> None:
    """Python's time for a decode step: the engine on a device that does nothing, at once."""
    for batch in batches:
        check_int("batch", batch, 1, config.max_num_seqs)
        engine = LLMEngine(config, backend=NullBackend(config, batch))
        seconds, _ = decode_times(engine, batch, 256)
        print(f"batch {batch}: {seconds * 1e3:.3f} ms a step, {seconds / batch * 1e6:.2f} us a row")


class NullExecutor:
    """A device that samples token 0 everywhere, in no time."""

    def run(
        self,
        program: str,
        dims: Mapping[str, int],
        inputs: Mapping[str, np.ndarray],
        fetch: tuple[str, ...],
        graph: bool = False,
    ) -> NumpyResult:
        """Zeros for the outputs; see `Executor.run`."""
        return NumpyResult({name: np.zeros(dims["S"], np.int32) for name in fetch})

    def write_row(self, name: str, row: int, values: np.ndarray) -> None:
        """Nothing: there is no state."""

    def report_times(self, report: Report | None) -> None:
        """Nothing: no op takes any time."""

    def close(self) -> None:
        """Nothing to free."""


class NullBackend:
    """A backend for `batch` sequences of up to 1024 tokens on the device that does nothing."""

    device_name: str = "nothing"
    asynchronous: bool = True
    max_model_len: int = 1024
    swapper: Swapper | None = None

    def __init__(self, config: EngineConfig, batch: int) -> None:
        self.executor: Executor = NullExecutor()
        self.limits = step_limits(
            batch, config.max_num_batched_tokens, self.max_model_len, config.block_size
        )
        self.memory = plan_memory(
            free_bytes=1 << 30,
            gpu_memory_utilization=1.0,
            release_threshold=1.0,
            weights_bytes=0,
            arena_bytes=0,
            state_bytes=0,
            temporary_bytes=0,
            block_bytes=1,
            override=batch * self.max_model_len // config.block_size,
        )

    def enter(self) -> None:
        """Any thread may give it work."""

    def pool_stats(self) -> PoolStats:
        """The plan."""
        return planned_usage(self.memory)

    def sleep(self, level: int) -> None:
        """Nothing to give back."""

    def wake_up(self) -> None:
        """Nothing to bring back."""

    def close(self) -> None:
        """Nothing to free."""
