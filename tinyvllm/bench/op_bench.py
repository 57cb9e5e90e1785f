"""An executor for one small program without a model: for kernels by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod

from tinyvllm.bench.synthetic import fill_random
from tinyvllm.bench.timing import captured, replay_seconds
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import Device, Stream, cuda_unavailable
from tinyvllm.driver.graph import GraphExec
from tinyvllm.driver.kernel import KernelLoader, PreparedLaunch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.pool import DevicePool
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.ops.program import Program, concrete
from tinyvllm.util import DType, InputError


@contextmanager
def opened_device(config: EngineConfig, bench: str) -> Iterator[tuple[Device, DType]]:
    """The GPU that is asked for, and the type of activations; InputError if there is none."""
    if reason := cuda_unavailable():
        raise InputError(f"{bench} needs a GPU: {reason}")
    index = config.gpu_index or 0
    dtype = DType.BF16 if config.dtype == "auto" else DType(config.dtype)
    with Device(index, config.kernel_path) as device:
        yield device, dtype


class OpBench(ExitStack):
    """A program on the device at sizes `dims`; frees everything at exit.

    `room`: rows of memory behind those that some states have.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        dims: Mapping[str, int],
        dtype: DType,
        room: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.device, self.program, self.dims = device, program.name, dims
        with ExitStack() as opened:
            self.stream = opened.enter_context(Stream())
            loader = opened.enter_context(KernelLoader(device))
            pool = opened.enter_context(DevicePool(device, device.mem_info()[0]))
            arrays = {}
            for name, rows in (room or {}).items():
                shape = concrete(program.buffers[name].shape, dims)
                most = shape[0] + rows
                ptr = pool.alloc(most * prod(shape[1:]) * dtype.itemsize, self.stream)
                opened.callback(pool.free, ptr, self.stream)
                arrays[name] = DeviceArray(ptr, shape, dtype, max_rows=most)
            self.executor = CudaExecutor(
                [program],
                arrays,
                dims,
                act=dtype,
                info=device.info,
                pool=pool,
                loader=loader,
                stream=self.stream,
            )
            opened.callback(self.executor.close)
            self.push(opened.pop_all())

    def fill(self, name: str, *, scale: float = 1.0) -> None:
        """Gives a state of activations random values of mean 0 and deviation `scale`."""
        fill_random(self.executor, self.executor.array(name), scale=scale)

    def launches(self) -> list[PreparedLaunch]:
        """Of all ops of the program, in its order."""
        by_op = self.executor.launches_by_op(self.program, self.dims)
        return [launch for _, launches in by_op for launch in launches]

    def graph(self, launches: list[PreparedLaunch]) -> GraphExec:
        """These launches one after the other, closed with all else."""
        graph: GraphExec = self.enter_context(captured(launches, self.stream))
        return graph

    def seconds(self, graph: GraphExec, replays: int) -> float:
        """Median time of a replay."""
        return replay_seconds(graph, self.stream, replays)
