"""Compiles, launches and checks one kernel with the driver layer alone."""

from pathlib import Path

import numpy as np

from tinyvllm.driver.compiler import compile_spec
from tinyvllm.driver.device import Device, Stream, cuda_unavailable
from tinyvllm.driver.kernel import KernelLoader
from tinyvllm.driver.memory import MemPool, copy_to_device, copy_to_host
from tinyvllm.driver.spec import Kernel

SOURCE = str(Path(__file__).resolve().with_name("saxpy.cu"))
SAXPY = Kernel(SOURCE, "saxpy", "ptr x, ptr y, f32 a, i32 n")(256)  # kBlock = 256


def main() -> None:
    if reason := cuda_unavailable():
        num_bytes = len(compile_spec(SAXPY, "sm_90").image)
        return print(f"{reason} Compiled {SAXPY.name} for sm_90: {num_bytes} bytes, not run.")
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
    with (
        Device(0) as device,
        Stream() as stream,
        KernelLoader(device) as loader,
        MemPool(device, release_threshold=0, max_bytes=1 << 25) as pool,
    ):
        x_ptr, y_ptr = pool.alloc(x.nbytes, stream), pool.alloc(y.nbytes, stream)
        copy_to_device(x_ptr, x, stream)
        copy_to_device(y_ptr, y, stream)
        loader.prepare(SAXPY.launch((4,), 256, x=x_ptr, y=y_ptr, a=2.0, n=1000)).run(stream)
        copy_to_host(y, y_ptr, stream)
        stream.synchronize()
        assert np.array_equal(y, 2 * x + 1), "the kernel computed something else"
        print(f"{SAXPY.name} on {device.info.name}: {len(y)} values are right.")


if __name__ == "__main__":
    main()
