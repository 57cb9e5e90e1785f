"""Kernels as data: what to compile, with which template arguments, and how to launch it.

Nothing here touches CUDA, so ops can describe launches, and `build.py` can collect every
specialisation, on a machine without a driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinyvllm.util import DType

CPP_TYPES = {
    DType.BF16: "__nv_bfloat16",
    DType.FP16: "__half",
    DType.F32: "float",
    DType.I32: "int",
}
# A parameter of each type in slots of eight bytes, as `struct` packs and unpacks it.
PARAM_FORMATS = {
    "ptr": "Q",
    "i32": "i4x",
    "u32": "I4x",
    "i64": "q",
    "u64": "Q",
    "f32": "f4x",
    "map": "128s",
}


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function (template) of `cuda_src/`.

    `signature` names the kernel's parameters in order with their types, for example
    "ptr x, ptr weight, ptr y, i32 K, f32 eps"; a test compares it with the source. A "map" is a
    `TensorMap`, here and in the source (cuda_src/include/tma.cuh).
    `arch` restricts the kernel to one architecture, for example "sm_90a". `pdl` says that it
    keeps the rules of programmatic dependent launch (cuda_src/include/common.cuh), so that it may
    be started while the kernel before it still runs.
    """

    file: str
    entry: str
    signature: str
    arch: str | None = None
    pdl: bool = False

    @cached_property
    def params(self) -> tuple[tuple[str, str], ...]:
        """(type, name) of each parameter, in order."""
        params = tuple(tuple(p.split()) for p in self.signature.split(","))
        assert all(len(p) == 2 and p[0] in PARAM_FORMATS for p in params), self.signature
        return params  # type: ignore[return-value]

    def __call__(self, *template_args: DType | int | bool) -> KernelSpec:
        """The specialisation with these template arguments (DType becomes a C++ type)."""
        return KernelSpec(self, tuple(_cpp(arg) for arg in template_args))


def _cpp(arg: DType | int | bool) -> str:
    if isinstance(arg, DType):
        return CPP_TYPES[arg]
    return str(arg).lower() if isinstance(arg, bool) else str(arg)


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel: the unit of compilation and of the cubin cache."""

    kernel: Kernel
    template_args: tuple[str, ...]

    @property
    def name(self) -> str:
        """The C++ name expression, for example `rms_norm_kernel<__nv_bfloat16, 8, 1>`."""
        args = ", ".join(self.template_args)
        return f"{self.kernel.entry}<{args}>" if args else self.kernel.entry

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        *,
        smem: int = 0,
        cluster: int = 1,
        pdl: bool = True,
        **args: Any,
    ) -> Launch:
        """A launch of this kernel; `args` are its parameters by name, all of them.

        `grid` has one to three dimensions, `block` is threads, `smem` dynamic shared bytes.
        `cluster` blocks that follow each other along x run together and reach each other's shared
        memory (compute capability 9.0 and newer). `pdl` False has it start only when the kernel
        before it has ended, though it could start earlier.
        """
        names = [name for _, name in self.kernel.params]
        if len(args) != len(names) or not all(name in args for name in names):
            raise TypeError(f"{self.name} takes {names}, got {sorted(args)}")
        x, y, z = (*grid, 1, 1)[:3]
        values = tuple(args[n] for n in names)
        return Launch(self, (x, y, z), block, smem, values, cluster, pdl and self.kernel.pdl)


@dataclass(frozen=True)
class TensorMap:
    """A matrix in device memory that TMA (compute capability 9.0 and newer) moves box by box.

    It has `rows` x `cols` elements of `dtype`, rows `row_stride` elements apart, from the device
    address `ptr` on. A box of `box_rows` x `box_cols` elements lies in shared memory row by row,
    its 16-byte chunks permuted within `swizzle` bytes (0, 32, 64 or 128). Elements of a box that
    are outside of the matrix are read as 0 and not written. `ptr` and the bytes between rows must
    be multiples of 16, box sides at most 256, and a box row no longer than `swizzle` bytes.
    """

    ptr: int
    dtype: DType
    rows: int
    cols: int
    row_stride: int
    box_rows: int
    box_cols: int
    swizzle: int = 128


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything but the stream. A "ptr" argument is a device address (int),
    a "map" a TensorMap.

    `pdl`: where the GPU can, it may start while the kernel before it still runs.
    """

    spec: KernelSpec
    grid: tuple[int, int, int]
    block: int
    smem: int
    args: tuple[Any, ...]
    cluster: int = 1
    pdl: bool = False


@dataclass(frozen=True)
class DeviceInfo:
    """What the choice of kernels and grids depends on; fixed per device."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_block: int  # bytes a block may use after opting in
    total_memory: int
    kernel_path: str = "portable"  # "hopper" or "portable"
