"""NVRTC: a kernel specialisation becomes machine code, through the disk cache, in threads."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tinyvllm.driver.cache import SCHEMA, CompiledKernel, KernelCache, Resources
from tinyvllm.driver.calls import CompileError, CudaError, call, phase
from tinyvllm.driver.spec import KernelSpec
from tinyvllm.util import InputError

OPTIONS = ("-std=c++17", "--ptxas-options=-v")  # -v: the log reports registers and spills
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


# --- where things are


@cache
def cuda_src_dir() -> Path:
    """The directory of the kernels: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "cuda_src", package.parent / "cuda_src"):
        if directory.is_dir():
            return directory
    raise InputError(f"no kernel sources: neither {package}/cuda_src nor beside it; reinstall")


def source_path(spec: KernelSpec) -> Path:
    """The file of a kernel: relative to `cuda_src_dir()`, or an absolute path of the caller's."""
    path = cuda_src_dir() / spec.kernel.file  # an absolute right side wins
    if not path.is_file():
        raise InputError(f"kernel {spec.kernel.entry}: {path} does not exist")
    return path


@cache
def cuda_include_dir() -> Path:
    """The directory of CUDA's own headers: of NVIDIA's wheel, else of an installed toolkit."""
    wheels = importlib.util.find_spec("nvidia")
    roots = [Path(p) / "cu13" for p in (wheels and wheels.submodule_search_locations) or ()]
    roots += [Path(os.environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    roots.append(Path("/usr/local/cuda"))
    for root in roots:
        if (root / "include" / "cuda_bf16.h").is_file():
            return root / "include"
    raise InputError("CUDA's headers were not found: pip install nvidia-cuda-runtime")


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that compiles."""
    major, minor = call("nvrtcVersion")
    return major, minor


def arch_name(compute_capability: tuple[int, int]) -> str:
    """What to compile for: "sm_90a" for 9.0, else "sm_XY".

    A GPU that this NVRTC does not know gets "compute_XY", PTX of the newest architecture that it
    knows and that the GPU can run.
    """
    major, minor = compute_capability
    number = 10 * major + minor
    supported = call("nvrtcGetSupportedArchs")
    if number == 90:
        return "sm_90a"
    if number in supported:
        return f"sm_{number}"
    older = [n for n in supported if n < number]
    if not older:
        raise InputError(f"compute capability {major}.{minor}: NVRTC starts at {min(supported)}")
    return f"compute_{max(older)}"


# --- the cache key


def _reachable(source: Path) -> list[Path]:
    """The source and every header of ours that it includes, directly or through others."""
    found = [source]
    for path in found:  # grows while it is walked
        for name in _INCLUDE.findall(path.read_bytes()):
            for directory in (path.parent, cuda_src_dir() / "include"):
                header = directory / os.fsdecode(name)
                if header.is_file():
                    if header not in found:
                        found.append(header)
                    break
    return found


@cache
def _cuda_headers_version() -> bytes:
    text = (cuda_include_dir() / "cuda.h").read_bytes()
    match = re.search(rb"#define CUDA_VERSION (\d+)", text)
    return match.group(1) if match else hashlib.sha256(text).digest()


def _source_digest(source: Path) -> bytes:
    """Of the source and all that it includes of ours."""
    digest = hashlib.sha256()
    for path in _reachable(source):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\0".encode() + content)
    return digest.digest()


def cache_key(spec: KernelSpec, arch: str, digests: dict[Path, bytes] | None = None) -> str:
    """Changes with everything that the compiled kernel depends on.

    `digests` keeps those of the sources, for who asks for many kernels at one moment.
    """
    digests = {} if digests is None else digests
    path = source_path(spec)
    if path not in digests:
        digests[path] = _source_digest(path)
    digest = hashlib.sha256()
    parts = [str(SCHEMA), str(nvrtc_version()), arch, *OPTIONS, spec.name, spec.kernel.signature]
    for part in [p.encode() for p in parts] + [_cuda_headers_version(), digests[path]]:
        digest.update(part + b"\0")
    return digest.hexdigest()[:40]


# --- compilation


def compile_spec(
    spec: KernelSpec, arch: str, kernel_cache: KernelCache | None = None
) -> CompiledKernel:
    """Machine code of `spec` for `arch`, from the cache if it is there.

    Raises CompileError with NVRTC's log, also when the kernel's parameters in the source are not
    those of its signature.
    """
    if spec.kernel.arch not in (None, arch):
        raise InputError(f"{spec.name} is for {spec.kernel.arch} only, not for {arch}")
    kernel_cache = kernel_cache or KernelCache()
    with phase("compile"):
        key = cache_key(spec, arch)
        compiled = kernel_cache.get(key)
        if compiled is None:
            compiled = _compile(spec, arch)
            kernel_cache.put(key, compiled)
    return compiled


def cached(
    specs: Iterable[KernelSpec], arch: str, kernel_cache: KernelCache
) -> Iterator[tuple[KernelSpec, CompiledKernel | None]]:
    """Each spec with what the cache has of it; nothing is compiled.

    One after the other: threads that read wait for each other more than for the files.
    """
    digests: dict[Path, bytes] = {}
    for spec in specs:
        with phase("compile"):
            yield spec, kernel_cache.get(cache_key(spec, arch, digests))


def compile_all(
    specs: Iterable[KernelSpec],
    arch: str,
    jobs: int | None = None,
    kernel_cache: KernelCache | None = None,
) -> dict[KernelSpec, CompiledKernel]:
    """Compiles every distinct spec, `jobs` at a time (default: one for each core)."""
    kernel_cache = kernel_cache or KernelCache()
    unique = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(jobs or os.cpu_count(), "compile") as pool:
        futures = [pool.submit(compile_spec, spec, arch, kernel_cache) for spec in unique]
        try:
            return {spec: future.result() for spec, future in zip(unique, futures, strict=True)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _compile(spec: KernelSpec, arch: str) -> CompiledKernel:
    path = source_path(spec)
    name = spec.name.encode()
    options = [f"-arch={arch}", *OPTIONS]
    options += [f"-I{d}" for d in (path.parent, cuda_src_dir() / "include", cuda_include_dir())]
    program = call("nvrtcCreateProgram", path.read_bytes(), os.fsencode(path), 0, [], [])
    try:
        call("nvrtcAddNameExpression", program, name)
        try:
            call("nvrtcCompileProgram", program, len(options), [o.encode() for o in options])
            lowered = call("nvrtcGetLoweredName", program, name).decode()
        except CudaError as error:
            log = _read(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
            raise CompileError(f"{spec.name} ({path}, {arch})", log or str(error)) from None
        log = _read(program, "ProgramLog").decode(errors="replace")
        ptx = _read(program, "PTX")
        _check_signature(spec, lowered, ptx.decode())
        if arch.startswith("compute_"):
            return CompiledKernel(ptx, lowered, None)
        return CompiledKernel(_read(program, "CUBIN"), lowered, parse_resources(log, lowered))
    finally:
        call("nvrtcDestroyProgram", program)


def _read(program: Any, what: str) -> bytes:
    """An output of a compiled program: "CUBIN", "PTX" or "ProgramLog"."""
    # NVRTC writes into the buffer, so it must not be `bytes`, which Python shares.
    buffer = bytearray(call(f"nvrtcGet{what}Size", program))
    call(f"nvrtcGet{what}", program, buffer)
    return bytes(buffer)


_PTX_TYPES = {
    "ptr": ("u64", "b64"),
    "i32": ("u32", "s32", "b32"),
    "u32": ("u32", "s32", "b32"),
    "i64": ("u64", "s64", "b64"),
    "u64": ("u64", "s64", "b64"),
    "f32": ("f32",),
    "map": ("align",),  # .param .align 64 .b8 name[128]
}


def _check_signature(spec: KernelSpec, lowered: str, ptx: str) -> None:
    """A launch packs bytes by the signature, so a mismatch would read wrong or missing bytes."""
    declared = re.search(rf"\.entry {re.escape(lowered)}\(([^)]*)\)", ptx)
    assert declared, f"{lowered} is not in the PTX"
    params = [p for p in declared.group(1).split(",") if p.strip()]
    types = [m.group(1) if (m := re.match(r"\s*\.param \.(\w+)", p)) else "struct" for p in params]
    wanted = spec.kernel.params
    if len(types) != len(wanted) or any(
        found not in _PTX_TYPES[kind] for found, (kind, _) in zip(types, wanted, strict=True)
    ):
        raise CompileError(
            spec.name,
            f"its signature is declared as ({spec.kernel.signature}), "
            f"but the source's parameters are ({', '.join(types)})",
        )


def parse_resources(log: str, lowered: str) -> Resources | None:
    """What the assembler's log says of one kernel, the functions that it calls included.

    None where the log says nothing of it: NVRTC 13.0 leaves the report out of some of the logs
    while several threads compile.
    """
    sections = re.split(r"Compiling entry function '([^']+)'", log)
    section = dict(zip(sections[1::2], sections[2::2], strict=True)).get(lowered)
    if section is None:
        return None

    def numbers(unit: str) -> list[int]:
        return [int(n) for n in re.findall(rf"(\d+) {unit}", section)] or [0]

    return Resources(
        registers=max(numbers("registers")),
        static_smem=max(numbers("bytes smem")),
        stack=max(numbers("bytes stack frame") + numbers("bytes cumulative stack size")),
        spill_stores=sum(numbers("bytes spill stores")),
        spill_loads=sum(numbers("bytes spill loads")),
    )
