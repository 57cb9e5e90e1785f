"""`tinyvllm doctor`: checks what the engine needs, and says what to do about each problem."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable

import numpy as np

from tinyvllm.driver.cache import KernelCache, default_directory
from tinyvllm.driver.calls import CompileError, CudaError, call
from tinyvllm.driver.compiler import (
    arch_name,
    compile_spec,
    cuda_include_dir,
    cuda_src_dir,
    nvrtc_version,
)
from tinyvllm.driver.device import NO_DRIVER, NO_GPU, Device, Stream, cuda_unavailable
from tinyvllm.driver.kernel import KernelLoader
from tinyvllm.driver.memory import copy_to_device, copy_to_host
from tinyvllm.driver.spec import Kernel
from tinyvllm.memory.pool import DevicePool
from tinyvllm.util import DType, InputError, ceil_div, format_bytes

AXPY = Kernel("doctor.cu", "doctor_kernel", "ptr x, ptr y, f32 a, i32 n")
BLOCK = 256
ARCH_WITHOUT_GPU = (9, 0)


class ProblemError(Exception):
    """A check failed; the message says what is wrong and what to do."""


def run_doctor(
    device_index: int = 0, write: Callable[[str], None] = print, *, as_json: bool = False
) -> int:
    """Runs every check, writing one line for each; returns the exit status: 1 with a problem.

    `as_json` writes one JSON object instead. A machine without a GPU is no problem: the engine
    then runs on the CPU.
    """
    checks: list[dict[str, str]] = []

    def say(state: str, name: str, text: str) -> None:
        checks.append({"state": state, "name": name, "text": text})
        if not as_json:
            write(f"{state:<8} {name}: {text}")

    def check(name: str, body: Callable[[], str]) -> None:
        try:
            say("ok", name, body())
        except (ProblemError, InputError, CompileError, CudaError) as error:
            say("problem", name, str(error))

    check("NVRTC", _nvrtc)
    check("headers", lambda: str(cuda_include_dir()))
    check("kernel sources", lambda: str(cuda_src_dir()))
    check("kernel cache", _cache)
    unavailable = cuda_unavailable()
    if unavailable in (NO_DRIVER, NO_GPU):
        say("none", "GPU", f"{unavailable} The engine runs on the CPU.")
        check("kernel", _compile_only)
    elif unavailable:
        say("problem", "GPU", f"{unavailable} The engine runs on the CPU until that is changed.")
        check("kernel", _compile_only)
    else:
        check("GPU", lambda: _gpu(device_index))
        check("memory pool", lambda: _pool(device_index))
        check("kernel", lambda: _run_kernel(device_index))
    problems = sum(entry["state"] == "problem" for entry in checks)
    if as_json:
        write(json.dumps({"problems": problems, "checks": checks}))
    else:
        write("no problems" if problems == 0 else f"{problems} problem(s)")
    return int(problems > 0)


def _nvrtc() -> str:
    try:
        version = nvrtc_version()
    except ImportError:
        raise ProblemError("pip install 'cuda-python>=13,<14'") from None
    except RuntimeError as error:  # the bindings did not find the library
        raise ProblemError(f"{error}: pip install 'nvidia-cuda-nvrtc>=13,<14'") from None
    if version < (13, 0):
        raise ProblemError(
            f"version {version[0]}.{version[1]}: pip install 'nvidia-cuda-nvrtc>=13,<14'"
        )
    return f"version {version[0]}.{version[1]}"


def _cache() -> str:
    directory = default_directory()
    if directory is None:
        raise ProblemError("there is no home directory: set TINYVLLM_CACHE_DIR")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ProblemError(f"{directory}: {error.strerror}: set TINYVLLM_CACHE_DIR") from None
    return f"{directory}, {sum(1 for _ in directory.glob('*.kernel'))} kernels"


def _gpu(index: int) -> str:
    version = call("cuDriverGetVersion")
    with Device(index) as device:
        free, total = device.mem_info()
        major, minor = device.info.compute_capability
        return (
            f"{device.info.name}, compute capability {major}.{minor}, {device.info.num_sms} SMs, "
            f"{format_bytes(free)} of {format_bytes(total)} free, "
            f"driver for CUDA {version // 1000}.{version % 1000 // 10}"
        )


def _pool(index: int) -> str:
    with Device(index) as device:
        if not device.attribute("MEMORY_POOLS_SUPPORTED"):
            raise ProblemError(f"{device.info.name} has no memory pools: use another GPU")
    return "supported"


def _compile_only() -> str:
    arch = arch_name(ARCH_WITHOUT_GPU)
    compiled = compile_spec(AXPY(DType.BF16, BLOCK), arch, KernelCache())
    return f"compiled for {arch}, {len(compiled.image)} bytes; not run"


def _run_kernel(index: int) -> str:
    n = 1000
    x = DType.BF16.encode(np.arange(n, dtype=np.float32) % 100)
    y = DType.BF16.encode(np.ones(n, np.float32))
    with (
        Device(index) as device,
        Stream() as stream,
        KernelLoader(device) as loader,
        DevicePool(device, 1 << 24) as pool,
    ):
        x_ptr, y_ptr = pool.alloc(x.nbytes, stream), pool.alloc(y.nbytes, stream)
        copy_to_device(x_ptr, x, stream)
        copy_to_device(y_ptr, y, stream)
        spec = AXPY(DType.BF16, BLOCK)
        launch = spec.launch((ceil_div(n, BLOCK),), BLOCK, x=x_ptr, y=y_ptr, a=2.0, n=n)
        loader.prepare(launch).run(stream)
        copy_to_host(y, y_ptr, stream)
        stream.synchronize()
        arch = loader.arch
    wrong = int((DType.BF16.decode(y) != 2 * (np.arange(n) % 100) + 1).sum())
    if wrong:
        raise ProblemError(f"{wrong} of {n} results are wrong: check the GPU and its driver")
    return f"compiled for {arch}, run and checked"
