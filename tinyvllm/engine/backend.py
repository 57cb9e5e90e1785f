"""The model on a device, as the engine sees it, and the choice of the device."""

from __future__ import annotations

from typing import Protocol

from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import CudaUnavailableError, check_driver
from tinyvllm.memory.budget import MemoryPlan
from tinyvllm.memory.pool import PoolStats
from tinyvllm.memory.swapper import Swapper
from tinyvllm.model.hub import LocalModel
from tinyvllm.ops.executor import Executor
from tinyvllm.util import InputError, logger, no_collection


class Backend(Protocol):
    """An executor with what the engine must know of it.

    It wakes with another executor than it went to sleep with, so nobody keeps one.
    """

    executor: Executor  # closed while asleep
    device_name: str
    asynchronous: bool  # runs go on while the host does something else
    max_model_len: int
    limits: dict[str, int]  # largest sizes of a run
    memory: MemoryPlan

    @property
    def swapper(self) -> Swapper | None:
        """None: preempted sequences are always computed again."""
        ...

    def enter(self) -> None:
        """Comes before work that a thread gives the device."""
        ...

    def pool_stats(self) -> PoolStats:
        """What the pool of device memory holds."""
        ...

    def sleep(self, level: int) -> None:
        """Gives the device's memory back. Level 1 keeps the weights on the host, level 2 does not.

        No run and no copy of a block may be under way. After an error it is awake as before.
        """
        ...

    def wake_up(self) -> None:
        """Brings the weights back and starts with empty states. After an error it still sleeps."""
        ...

    def close(self) -> None:
        """Frees everything, awake or asleep."""
        ...


def open_backend(config: EngineConfig, model: LocalModel) -> Backend:
    """Loads the model onto the device that the configuration asks for.

    "auto" is the first GPU, or the CPU where CUDA cannot be used (said in one log line). Raises
    InputError for a device that is asked for and not there, and for a model that does not fit.
    """
    index = config.gpu_index
    if index is not None:
        try:
            check_driver()
            from tinyvllm.engine.cuda_backend import CudaBackend  # one of the two is needed

            with no_collection():
                return CudaBackend(config, model, index)
        except CudaUnavailableError as error:
            if config.device != "auto":
                raise InputError(f"device={config.device!r}: {error}") from None
            logger.info("%s Running on the CPU.", error)
    from tinyvllm.engine.cpu_backend import CpuBackend

    return CpuBackend(config, model)
