"""The device, its primary context, and what orders work on it: streams and events."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tinyvllm.driver.calls import CudaError, call, driver_api, succeeds
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.util import Closing, InputError

MIN_CUDA = 13000  # as cuDriverGetVersion counts; driver 580 is the first with CUDA 13.0
MIN_COMPUTE_CAPABILITY = (8, 0)


_current = threading.local()  # .context: the one that this thread was given last

NO_BINDINGS = "The package cuda-python is not installed."
NO_DRIVER = "No NVIDIA driver is installed (libcuda.so.1 was not found)."
NO_GPU = "The NVIDIA driver sees no GPU."


class CudaUnavailableError(InputError):
    """CUDA cannot be used; the message is one sentence that says why."""


def check_driver() -> None:
    """Raises CudaUnavailableError where the driver is missing or too old; does not start it."""
    try:
        version = call("cuDriverGetVersion")
    except ImportError:
        raise CudaUnavailableError(NO_BINDINGS) from None
    except CudaError as error:
        raise _cannot_start(error) from None
    except RuntimeError:  # what the bindings raise when libcuda cannot be loaded
        raise CudaUnavailableError(NO_DRIVER) from None
    if version < MIN_CUDA:
        raise CudaUnavailableError(
            f"The NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}; "
            f"tinyvllm needs CUDA 13.0, which comes with driver 580 or newer."
        )


def _start_driver() -> int:
    """The number of GPUs, at least one; CudaUnavailableError says why there is none."""
    try:
        call("cuInit", 0)
        count = int(call("cuDeviceGetCount"))
    except CudaError as error:
        raise _cannot_start(error) from None
    if count == 0:
        raise CudaUnavailableError(NO_GPU)
    return count


def _cannot_start(error: CudaError) -> CudaUnavailableError:
    if error.name == "CUDA_ERROR_NO_DEVICE":
        return CudaUnavailableError(NO_GPU)
    return CudaUnavailableError(
        f"The NVIDIA driver cannot start: {error.name}: {error.explanation}."
    )


def cuda_unavailable() -> str | None:
    """None when CUDA can be used, else one sentence that says why not."""
    try:
        check_driver()
        _start_driver()
    except CudaUnavailableError as error:
        return str(error)
    return None


class Device(Closing):
    """GPU number `index` with its primary context, current in the thread that made it.

    `kernel_path` is "auto" (the fastest that the GPU runs) or "portable".
    Raises CudaUnavailableError where there is no GPU, InputError for an index that does not exist
    and for a GPU that is too old. `check_driver` comes before.
    """

    def __init__(self, index: int = 0, kernel_path: str = "auto") -> None:
        count = _start_driver()
        if not 0 <= index < count:
            raise InputError(f"device cuda:{index}: the driver sees {count} GPU(s), from cuda:0 on")
        self.index = index
        self.handle = call("cuDeviceGet", index)
        # First, since it takes its time, in which other threads run.
        self._context: Any = call("cuDevicePrimaryCtxRetain", self.handle)
        try:
            self.info = _device_info(self.handle, kernel_path)
            self.make_current()
        except BaseException:
            self.close()
            raise

    def make_current(self) -> None:
        """Makes the context current in the calling thread; costs nothing where it is already."""
        if getattr(_current, "context", None) is not self._context:
            call("cuCtxSetCurrent", self._context)
            _current.context = self._context

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        free, total = call("cuMemGetInfo")
        return int(free), int(total)

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        call("cuCtxSynchronize")

    def attribute(self, name: str) -> int:
        """A device attribute, named without its prefix CU_DEVICE_ATTRIBUTE_."""
        return _attribute(self.handle, name)

    def close(self) -> None:
        if self._context is not None:
            self._context = None
            call("cuDevicePrimaryCtxRelease", self.handle)


def _attribute(handle: Any, name: str) -> int:
    key = getattr(driver_api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", key, handle))


def _device_info(handle: Any, kernel_path: str) -> DeviceInfo:
    capability = (
        _attribute(handle, "COMPUTE_CAPABILITY_MAJOR"),
        _attribute(handle, "COMPUTE_CAPABILITY_MINOR"),
    )
    name = call("cuDeviceGetName", 256, handle).split(b"\0")[0].decode()
    if capability < MIN_COMPUTE_CAPABILITY:
        raise InputError(
            f"{name} has compute capability {capability[0]}.{capability[1]}: "
            "tinyvllm needs 8.0 (Ampere) or newer"
        )
    return DeviceInfo(
        name=name,
        compute_capability=capability,
        num_sms=_attribute(handle, "MULTIPROCESSOR_COUNT"),
        smem_per_block=_attribute(handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        total_memory=int(call("cuDeviceTotalMem", handle)),
        # wgmma, TMA and setmaxnreg as the Hopper kernels use them exist on 9.0 alone.
        kernel_path="hopper" if capability == (9, 0) and kernel_path == "auto" else "portable",
    )


_ahead: dict[tuple[int, str], Future[Device]] = {}  # opened, or being opened, by arguments


def open_ahead(index: int | None, kernel_path: str) -> None:
    """Begins to open a device in a thread, for `open_device`: it takes a quarter of a second.

    For programs, beside their imports: what nobody opens later stays open until the process ends.
    None is no GPU. No error is raised here, but where the device is opened.
    """
    if index is None:
        return
    try:
        check_driver()
    except CudaUnavailableError:
        return
    thread = ThreadPoolExecutor(1, "start-up")
    _ahead[index, kernel_path] = thread.submit(Device, index, kernel_path)
    thread.shutdown(wait=False)


def open_device(index: int, kernel_path: str) -> Device:
    """The device that `open_ahead` was asked for, or else a new one; see `Device`."""
    ahead = _ahead.pop((index, kernel_path), None)
    return Device(index, kernel_path) if ahead is None else ahead.result()


class Event(Closing):
    """A point in a stream's work. `timing=True` makes `elapsed_ms` possible."""

    def __init__(self, timing: bool = False) -> None:
        flags = driver_api().CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self.handle: Any = call("cuEventCreate", int(flag))

    def record(self, stream: Stream) -> None:
        """Marks the work given to `stream` so far."""
        call("cuEventRecord", self.handle, stream.handle)

    def synchronize(self) -> None:
        """Waits until the marked work is done; returns at once if nothing was recorded."""
        call("cuEventSynchronize", self.handle)

    def query(self) -> bool:
        """Whether the marked work is done."""
        return succeeds("cuEventQuery", self.handle, unless="CUDA_ERROR_NOT_READY")

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds of device time from `start` to this event, both recorded with timing."""
        return float(call("cuEventElapsedTime", start.handle, self.handle))

    def close(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            call("cuEventDestroy", handle)


class Stream(Closing):
    """An ordered queue of work in the current context, independent of the null stream.

    `capturing` says whether work given to it goes into a graph instead of running: `capture` sets
    it, so that an allocation need not ask the driver.
    """

    def __init__(self) -> None:
        self.capturing = False
        flag = driver_api().CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle: Any = call("cuStreamCreate", int(flag))

    def synchronize(self) -> None:
        """Waits for all work given to this stream."""
        call("cuStreamSynchronize", self.handle)

    def wait(self, event: Event) -> None:
        """Later work of this stream waits for `event`; the host does not."""
        call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def close(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            call("cuStreamDestroy", handle)
