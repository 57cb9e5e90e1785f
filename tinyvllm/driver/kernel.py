"""Kernels on the device: load compiled ones, pack a launch's arguments once, run it often."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tinyvllm.driver.cache import CompiledKernel, KernelCache
from tinyvllm.driver.calls import CudaError, call, driver_api, phase
from tinyvllm.driver.compile_queue import CompileQueue
from tinyvllm.driver.compiler import arch_name, cached
from tinyvllm.driver.decode import forget_kernel, name_kernel
from tinyvllm.driver.device import Device, Stream
from tinyvllm.driver.spec import PARAM_FORMATS, Kernel, KernelSpec, Launch, TensorMap
from tinyvllm.driver.tensor_map import encode
from tinyvllm.util import Closing, InputError, logger

DEFAULT_SMEM = 48 * 1024  # dynamic bytes beyond this need the function's permission
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CLUSTER = 8  # blocks; some GPUs could do more, if asked to
# Seconds after which `request_later` begins, how long its thread works, and how long it rests
# before it goes on: without rests the steps of other threads wait for Python's lock.
LATER, BUSY, PAUSE = 0.3, 0.0005, 0.002


@dataclass
class LoadedKernel:
    """A function on the device, with the limits that a launch is checked against."""

    module: Any
    function: Any
    max_threads: int
    static_smem: int
    dynamic_smem: int  # bytes allowed so far
    packer: struct.Struct
    offsets: tuple[int, ...]  # of the parameters in what `packer` makes


class KernelLoader(Closing):
    """Compiles and loads the kernels of one device. To be used from one thread at a time, beside
    that of `request_later`."""

    def __init__(self, device: Device, kernel_cache: KernelCache | None = None) -> None:
        self.device = device
        self.arch = arch_name(device.info.compute_capability)
        self._cache = kernel_cache or KernelCache()
        self._queue = CompileQueue(self.arch, self._cache)
        self._loaded: dict[KernelSpec, LoadedKernel] = {}
        self._lock = threading.RLock()  # around changes of the queue and of what is loaded
        self._later: threading.Thread | None = None
        self._closing = threading.Event()
        self.pdl = device.info.compute_capability >= (9, 0)

    def request(self, specs: Iterable[KernelSpec]) -> None:
        """Loads those that the cache has; has the others compiled beside what comes next.

        What needs one of these waits for it, by itself (`load_all`). `specs` is taken from one by
        one, so that the first are being compiled while the last are still looked for.
        """
        new = (spec for spec in specs if spec not in self._loaded and spec not in self._queue)
        for spec, kernel in cached(new, self.arch, self._cache):
            with self._lock:
                if spec in self._loaded or spec in self._queue:
                    continue  # by the other thread, meanwhile
                if kernel is None:
                    self._queue.put(spec)
                else:
                    self._load(spec, kernel)

    def request_later(self, specs: Iterable[KernelSpec]) -> None:
        """Has a thread request these in a moment, when the first steps are on their way.

        `specs` is taken from in that thread, which ends with the loader or the main thread. May be
        called once. An error is logged, and raised again where a step needs the kernel.
        """
        self._later = threading.Thread(target=self._load_later, args=(specs,), name="later-kernels")
        self._later.start()

    def _load_later(self, specs: Iterable[KernelSpec]) -> None:
        def ends(rest: float) -> bool:
            return self._closing.wait(rest) or not threading.main_thread().is_alive()

        def unhurried() -> Iterator[KernelSpec]:
            begin = time.perf_counter()
            for spec in specs:
                yield spec
                if time.perf_counter() - begin > BUSY:
                    if ends(PAUSE):
                        return
                    begin = time.perf_counter()

        if ends(LATER):
            return
        try:
            self.device.make_current()
            self.request(unhurried())
        except RuntimeError as error:  # of CUDA; or the process ends, and no thread can start
            logger.warning("kernels are now loaded only when a step needs them: %s", error)

    def load_all(self, specs: Iterable[KernelSpec]) -> None:
        """Loads every spec that is not loaded yet, once it is compiled: before all others.

        Raises CompileError for a kernel that does not compile.
        """
        missing = dict.fromkeys(spec for spec in specs if spec not in self._loaded)
        if not missing:
            return
        with self._lock:
            self.request(missing)
            compiled = self._queue.get(s for s in missing if s not in self._loaded)
            for spec, kernel in compiled.items():
                self._load(spec, kernel)

    def load_requested(self) -> None:
        """Waits for all that was requested, and loads it: afterwards nothing waits for a kernel."""
        self.load_all(self._queue.pending())

    def _load(self, spec: KernelSpec, kernel: CompiledKernel) -> None:
        with phase("compile"):
            self._loaded[spec] = _load(spec, kernel.image, kernel.lowered_name)

    def prepare(self, launch: Launch) -> PreparedLaunch:
        """Checks a launch and packs its arguments; loads its kernel if that was not done yet.

        Raises InputError, naming the kernel and the limit, for a grid, block, amount of shared
        memory or argument that is out of range.
        """
        return PreparedLaunch(launch, self.kernel(launch), launch.pdl and self.pdl)

    def kernel(self, launch: Launch) -> LoadedKernel:
        """The kernel of a launch, loaded and allowed what the launch needs; see `prepare`."""
        kernel = self._loaded.get(launch.spec)
        if kernel is None:
            self.load_all([launch.spec])
            kernel = self._loaded[launch.spec]
        _check_limits(launch, kernel, self.device.info.smem_per_block)
        if launch.smem > max(kernel.dynamic_smem, DEFAULT_SMEM - kernel.static_smem):
            attribute = driver_api().CUfunction_attribute
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", kernel.function, key, launch.smem)
            kernel.dynamic_smem = launch.smem
        return kernel

    def close(self) -> None:
        """Unloads all kernels; launches prepared from them must not run any more.

        Waits for what is being compiled at this moment, for the cache.
        """
        self._closing.set()
        if self._later is not None:
            self._later.join()
        self._queue.close()
        for kernel in self._loaded.values():
            call("cuModuleUnload", kernel.module)
            forget_kernel(kernel.function)
        self._loaded.clear()


class PreparedLaunch:
    """A launch whose arguments are packed: running it costs one driver call."""

    def __init__(self, launch: Launch, kernel: LoadedKernel, pdl: bool = False) -> None:
        self.launch = launch
        count = len(launch.args)
        # The driver takes an array of pointers to the values: both lie in this one block.
        self._block = (ctypes.c_uint64 * (count + kernel.packer.size // 8))()
        pointers = ctypes.addressof(self._block)
        values = pointers + 8 * count
        self._block[:count] = [values + offset for offset in kernel.offsets]
        args = [encode(arg) if isinstance(arg, TensorMap) else arg for arg in launch.args]
        try:
            # `struct` checks ranges, as ctypes does not.
            kernel.packer.pack_into(self._block, 8 * count, *args)
        except struct.error as error:
            raise InputError(f"{describe(launch)}: {bad_argument(launch, error)}") from None
        self._function, self._pointers = kernel.function, pointers
        self._config = launch_config(launch, pdl)

    def run(self, stream: Stream) -> None:
        """Launches in `stream`; the driver copies the arguments before it returns."""
        self._config.hStream = stream.handle
        try:
            call("cuLaunchKernelEx", self._config, self._function, self._pointers, 0)
        except CudaError as error:
            raise error.with_detail(describe(self.launch)) from None


def launch_config(launch: Launch, pdl: bool) -> Any:
    cu = driver_api()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes = launch.smem
    ids, attributes = cu.CUlaunchAttributeID, []
    if pdl:
        attribute = cu.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if launch.cluster > 1:
        attribute = cu.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = launch.cluster, 1, 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _load(spec: KernelSpec, image: bytes, lowered_name: str) -> LoadedKernel:
    try:
        module = call("cuModuleLoadData", image)
        function = call("cuModuleGetFunction", module, lowered_name.encode())
        # Otherwise its first launch does that, and may wait for the device.
        call("cuFuncLoad", function)
    except CudaError as error:
        raise error.with_detail(f"loading {spec.name}") from None
    name_kernel(function, spec)

    def limit(name: str) -> int:
        key = getattr(driver_api().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(call("cuFuncGetAttribute", key, function))

    packer, offsets = _packing(spec.kernel)
    return LoadedKernel(
        module,
        function,
        max_threads=limit("MAX_THREADS_PER_BLOCK"),
        static_smem=limit("SHARED_SIZE_BYTES"),
        dynamic_smem=0,
        packer=packer,
        offsets=offsets,
    )


def _packing(kernel: Kernel) -> tuple[struct.Struct, tuple[int, ...]]:
    formats = [PARAM_FORMATS[kind] for kind, _ in kernel.params]
    offsets = tuple(struct.calcsize("<" + "".join(formats[:i])) for i in range(len(formats)))
    return struct.Struct("<" + "".join(formats)), offsets


def describe(launch: Launch) -> str:
    return f"{launch.spec.name}, grid {launch.grid}, block {launch.block}, smem {launch.smem}"


def _check_limits(launch: Launch, kernel: LoadedKernel, smem_per_block: int) -> None:
    if not all(1 <= size <= limit for size, limit in zip(launch.grid, MAX_GRID, strict=True)):
        raise InputError(f"{describe(launch)}: the grid must be from 1 to {MAX_GRID}")
    if not 1 <= launch.cluster <= MAX_CLUSTER or launch.grid[0] % launch.cluster:
        raise InputError(
            f"{describe(launch)}: clusters of {launch.cluster} blocks: must be from 1 to "
            f"{MAX_CLUSTER} and divide the grid"
        )
    if not 1 <= launch.block <= kernel.max_threads:
        raise InputError(
            f"{describe(launch)}: the block must be from 1 to {kernel.max_threads} threads"
        )
    if not 0 <= launch.smem <= smem_per_block - kernel.static_smem:
        raise InputError(
            f"{describe(launch)}: a block may use {smem_per_block} bytes of shared memory, of "
            f"which {kernel.static_smem} are static"
        )


def bad_argument(launch: Launch, error: struct.error) -> str:
    """Names the argument that `struct` refused (it names only the format)."""
    for (kind, name), value in zip(launch.spec.kernel.params, launch.args, strict=True):
        try:
            struct.pack("<" + PARAM_FORMATS[kind], value)
        except struct.error:
            return f"{name}={value!r} is no {kind}"
    return str(error)
