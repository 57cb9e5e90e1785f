"""The model on a GPU: device, stream, pool and kernels stay; memory comes and goes with sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tinyvllm.config import EngineConfig
from tinyvllm.driver.calls import CudaError, phase
from tinyvllm.driver.compiler import nvrtc_version
from tinyvllm.driver.device import Device, Stream, open_device
from tinyvllm.driver.kernel import KernelLoader
from tinyvllm.driver.memory import PinnedBuffer, copy_to_device, copy_to_host
from tinyvllm.engine.sizing import (
    engine_limits,
    engine_programs,
    model_dtype,
    plan_engine,
    swap_space,
)
from tinyvllm.engine.step_kernels import first_kernels, step_kernels
from tinyvllm.memory.cuda_swapper import CudaSwapper
from tinyvllm.memory.pool import DevicePool, OutOfMemoryError, PoolStats
from tinyvllm.memory.upload import CopyJob, Uploader
from tinyvllm.model.hub import LocalModel
from tinyvllm.model.presets import DummySource
from tinyvllm.model.programs import step_program
from tinyvllm.model.source import TensorSource
from tinyvllm.model.weights import (
    check_weights,
    copy_jobs,
    dummy_launches,
    packed_weights,
    place_weights,
)
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.ops.executor import Executor, arena_plans
from tinyvllm.progress import Progress
from tinyvllm.util import format_bytes, log_start, logger


class CudaBackend:
    """See `Backend`. `index` is the GPU's number.

    Everything that lies in the pool, or knows an address in it, is opened by `_open` and closed
    when the backend goes to sleep. What is pinned of the swap space stays so.
    """

    asynchronous: bool = True

    def __init__(self, config: EngineConfig, model: LocalModel, index: int = 0) -> None:
        self._config, self._model = config, model
        self._act = model_dtype(config, model.config)
        self._awake = ExitStack()  # closes what `_open` has opened
        self._saved: PinnedBuffer | None = None  # the weights, while asleep at level 1
        self._base = 0  # address of the weights
        self.executor: Executor
        with ExitStack() as stack:
            # The driver's slowest calls are made in a thread, beside Python's part of the start.
            with ThreadPoolExecutor(1, "start-up") as beside:
                opening = beside.submit(open_device, index, config.kernel_path)
                try:
                    self._programs = engine_programs(config, model.config, primitive=False)
                    self._packed = packed_weights(self._programs)
                    nvrtc_version()  # loads the library, which takes its time
                    log_start("programs, compiler's library")
                finally:
                    self.device: Device = stack.enter_context(opening.result())
            self.device.make_current()
            log_start("driver and context, as far as not beside what came before")
            self.device_name = f"cuda:{index} ({self.device.info.name})"
            self.memory, self.max_model_len = plan_engine(
                config,
                model.config,
                self._programs,
                free_bytes=self.device.mem_info()[0],
                act=self._act,
                device=self.device.info,
            )
            log_start("memory plan")
            self.limits = engine_limits(config, self.max_model_len, self.memory.num_blocks)
            self.stream = stack.enter_context(Stream())
            self.pool: DevicePool = stack.enter_context(
                DevicePool(
                    self.device,
                    self.memory.budget,
                    config.release_threshold,
                    reuse_follow_event_dependencies=config.pool_reuse_follow_event_dependencies,
                    reuse_allow_opportunistic=config.pool_reuse_allow_opportunistic,
                    reuse_allow_internal_dependencies=(
                        config.pool_reuse_allow_internal_dependencies
                    ),
                )
            )
            with ThreadPoolExecutor(1, "start-up") as beside:
                reserving = beside.submit(self._reserve)
                self._loader = stack.enter_context(KernelLoader(self.device))
                kernels_of = self._programs, self.limits, self._act, self.device.info
                self._loader.request(first_kernels(*kernels_of))
                if config.wait_for_kernels:
                    self._loader.request(step_kernels(*kernels_of))
                self._plans = arena_plans(*kernels_of)
                log_start("kernels of the first steps, as far as the cache has them")
            reserving.result()
            log_start("memory pool, as far as not beside the kernels")
            space = swap_space(config, self.memory.block_bytes)
            self.swapper: CudaSwapper | None = None
            if space is not None:
                self.swapper = stack.enter_context(CudaSwapper(space, self.stream))
            self._open(self._read_weights)
            stack.callback(self._awake.close)  # after an error; otherwise it is closed before
            if config.wait_for_kernels:
                self._loader.load_requested()
            else:
                self._loader.request_later(step_kernels(*kernels_of))
            if self.swapper is not None and config.pin_swap_space:
                self.swapper.reserve_all()
            self._resources = stack.pop_all()

    def enter(self) -> None:
        """Makes the context current in the calling thread."""
        self.device.make_current()

    def pool_stats(self) -> PoolStats:
        """The pool's own attributes."""
        return self.pool.stats()

    def sleep(self, level: int) -> None:
        """Frees all of the pool, at level 1 after a copy of the weights; see `Backend.sleep`.

        OutOfMemoryError where the host cannot pin as much as the weights take.
        """
        if level == 1:
            self._saved = self._save_weights()
        self._awake.close()

    def wake_up(self) -> None:
        """Allocates and builds all anew; see `Backend.wake_up`."""
        self._open(self._read_weights if self._saved is None else self._restore_weights)
        self._drop_saved()

    def close(self) -> None:
        """Waits for the device and frees everything."""
        with self._resources:
            self._drop_saved()
            self._awake.close()

    def _reserve(self) -> None:
        """Has the pool get all that is planned from the driver, which later takes parts of it."""
        self.device.make_current()
        self.pool.free(
            self.pool.alloc(self.memory.fixed + self.memory.kv, self.stream), self.stream
        )

    def _open(self, fill: Callable[[int], None]) -> None:
        """Brings the weights to a new address, by `fill`, and opens what works with the pool.

        After an error nothing of it is left.
        """
        with ExitStack() as stack:
            stack.callback(self._give_back)
            self._base = self.pool.alloc(self.memory.weights, self.stream)
            stack.callback(self.pool.free, self._base, self.stream)
            with phase("weights"):
                fill(self._base)
            log_start("weights")
            weights, _ = place_weights(self._packed, self._act, self._base)
            executor = CudaExecutor(
                self._programs,
                weights,
                self.limits,
                act=self._act,
                info=self.device.info,
                pool=self.pool,
                loader=self._loader,
                stream=self.stream,
                plans=self._plans,
            )
            stack.callback(executor.close)
            # Reserved now, so that the pool does not grow when a step first needs temporaries.
            temporaries = self.pool.alloc(self.memory.temporaries, self.stream)
            self.pool.free(temporaries, self.stream)
            if self.swapper is not None:
                self.swapper.attach(executor.array("kv_cache"))
                stack.callback(self.swapper.detach)
            self.executor = executor
            self._awake = stack.pop_all()
            log_start("states, staging memory")

    def _give_back(self) -> None:
        """Returns to the driver what has been freed."""
        self.device.synchronize()
        self.pool.trim()

    def _save_weights(self) -> PinnedBuffer:
        """The weights as they lie on the device, in pinned memory."""
        try:
            saved = PinnedBuffer(self.memory.weights)
        except CudaError as error:
            raise OutOfMemoryError(
                f"sleep(level=1): {format_bytes(self.memory.weights)} of weights find no room in "
                f"pinned host memory ({error.name}); level=2 reads them from the files again"
            ) from error
        copy_to_host(saved.array, self._base, self.stream)
        self.stream.synchronize()
        return saved

    def _restore_weights(self, base: int) -> None:
        assert self._saved is not None
        copy_to_device(base, self._saved.array, self.stream)
        self.stream.synchronize()

    def _drop_saved(self) -> None:
        if self._saved is not None:
            self._saved.close()
            self._saved = None

    def _read_weights(self, base: int) -> None:
        """The weights of the model's files, or random ones, to their places from `base` on."""
        source = self._model.open_source()
        try:
            if isinstance(source, DummySource):
                self._make_weights(source, base)
            else:
                size = self._config.block_size
                program = step_program(self._model.config, "check", block_size=size)
                check_weights(source, program, self._model.where)
                self._upload_weights(source, base)
        finally:
            source.close()

    def _make_weights(self, source: DummySource, base: int) -> None:
        arrays, _ = place_weights(self._packed, self._act, base)
        for launch in dummy_launches(source, self._packed, arrays):
            self._loader.prepare(launch).run(self.stream)
        self.stream.synchronize()

    def _upload_weights(self, source: TensorSource, base: int) -> None:
        # The copies run in a stream of their own; the weights are used once they are done.
        self.stream.synchronize()
        arrays, num_bytes = place_weights(self._packed, self._act, base)
        with (
            Stream() as copies,
            Uploader(copies) as uploader,
            Progress(num_bytes, "Loading weights", "B") as bar,
        ):
            done = uploader.upload(_counted(copy_jobs(source, self._packed, arrays), bar))
        logger.info(
            "weights: %s in %.2f s (%.1f GB/s)",
            format_bytes(done.num_bytes),
            done.seconds,
            done.num_bytes / done.seconds / 1e9,
        )


def _counted(jobs: Iterable[CopyJob], bar: Progress) -> Iterator[CopyJob]:
    """The jobs, each counted as it is begun."""
    for job in jobs:
        yield job
        bar.update(job.num_bytes)
