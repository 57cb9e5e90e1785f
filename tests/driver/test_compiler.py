from concurrent.futures import ThreadPoolExecutor

import pytest

from tinyvllm.driver import calls, compiler
from tinyvllm.driver.cache import KernelCache
from tinyvllm.driver.calls import CompileError
from tinyvllm.driver.compiler import (
    arch_name,
    cache_key,
    compile_all,
    compile_spec,
    cuda_include_dir,
    cuda_src_dir,
    parse_resources,
)
from tinyvllm.driver.recorder import recording
from tinyvllm.driver.spec import Kernel
from tinyvllm.util import DType, InputError

SCALE = """
#include <cuda_bf16.h>
#include "factor.cuh"
template <typename T, int kBlock>
__global__ void scale(T* x, float a, int n, long long unused, unsigned mask) {
  __shared__ float tile[kBlock];
  const int i = blockIdx.x * kBlock + threadIdx.x;
  tile[threadIdx.x] = i < n ? float(x[i]) : 0.f;
  __syncthreads();
  if (i < n) x[i] = T(FACTOR * a * tile[threadIdx.x ^ mask]);
}
"""
SIGNATURE = "ptr x, f32 a, i32 n, i64 unused, u32 mask"

# More live values than 32 registers hold: the launch bounds force the compiler to spill.
SPILLS = """
__global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[i * n + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * n + threadIdx.x] = v[i] * v[(i * 7 + 3) % 64];
}
"""


@pytest.fixture
def scale(tmp_path):
    (tmp_path / "factor.cuh").write_text('#pragma once\n#include "value.cuh"\n')
    (tmp_path / "value.cuh").write_text("#pragma once\n#define FACTOR 2.f\n")
    (tmp_path / "scale.cu").write_text(SCALE)
    return Kernel(str(tmp_path / "scale.cu"), "scale", SIGNATURE)


@pytest.fixture
def cache(tmp_path):
    return KernelCache(tmp_path / "cache")


def test_directories_hold_what_they_should():
    assert (cuda_src_dir() / "doctor.cu").is_file()
    assert (cuda_include_dir() / "cuda_bf16.h").is_file()


def test_arch_names(monkeypatch):
    supported = lambda: (0, [80, 90, 100, 120])  # noqa: E731
    monkeypatch.setitem(calls._functions, "nvrtcGetSupportedArchs", supported)
    assert arch_name((8, 0)) == "sm_80"
    assert arch_name((9, 0)) == "sm_90a"
    assert arch_name((12, 0)) == "sm_120"
    assert arch_name((12, 1)) == "compute_120"
    assert arch_name((11, 0)) == "compute_100"
    with pytest.raises(InputError, match=r"7\.0"):
        arch_name((7, 0))


def test_compiles_to_a_cubin_with_resources(scale, cache):
    compiled = compile_spec(scale(DType.BF16, 128), "sm_80", cache)
    assert compiled.image.startswith(b"\x7fELF")
    assert "scale" in compiled.lowered_name and "bfloat16" in compiled.lowered_name
    used = compiled.resources
    assert used.static_smem == 512 and 0 < used.registers < 64
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)


def test_unknown_architecture_gets_ptx(scale, cache):
    compiled = compile_spec(scale(DType.F32, 64), "compute_90", cache)
    assert b".target sm_90" in compiled.image and compiled.resources is None


def test_spills_are_reported(tmp_path, cache):
    (tmp_path / "spills.cu").write_text(SPILLS)
    spec = Kernel(str(tmp_path / "spills.cu"), "spills", "ptr x, i32 n")()
    used = compile_spec(spec, "sm_90a", cache).resources
    assert used.stack > 0 and used.spill_stores > 0 and used.spill_loads > 0


def test_resources_are_those_of_the_named_kernel():
    log = """ptxas info    : Compiling entry function 'other' for 'sm_80'
    900 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 200 registers, 900 bytes cumulative stack size, 64 bytes smem
ptxas info    : Compiling entry function 'mine' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads"""
    used = parse_resources(log, "mine")
    assert (used.registers, used.static_smem, used.stack) == (40, 2048, 16)
    assert (used.spill_stores, used.spill_loads) == (4, 12)


def test_error_carries_the_log_with_file_and_line(tmp_path, cache):
    path = tmp_path / "broken.cu"
    path.write_text("__global__ void broken(int n) {\n  undefined_name = n;\n}\n")
    with pytest.raises(CompileError, match=r"broken\.cu\(2\).*undefined_name") as caught:
        compile_spec(Kernel(str(path), "broken", "i32 n")(), "sm_80", cache)
    assert "undefined_name" in caught.value.log


@pytest.mark.parametrize(
    "signature",
    [
        "ptr x, f32 a, i32 n, i64 unused",
        "ptr x, i32 a, i32 n, i64 unused, u32 mask",
        "ptr x, f32 a, i64 n, i64 unused, u32 mask",
        SIGNATURE + ", i32 more",
    ],
)
def test_signature_must_match_the_source(scale, cache, signature):
    kernel = Kernel(scale.file, "scale", signature)
    with pytest.raises(CompileError, match="signature"):
        compile_spec(kernel(DType.F32, 64), "sm_80", cache)


def test_missing_source_and_wrong_architecture_are_input_errors(scale, cache):
    with pytest.raises(InputError, match=r"nowhere\.cu"):
        compile_spec(Kernel("nowhere.cu", "k", "i32 n")(), "sm_80", cache)
    hopper = Kernel(scale.file, "scale", SIGNATURE, arch="sm_90a")
    with pytest.raises(InputError, match="sm_90a only"):
        compile_spec(hopper(DType.F32, 64), "sm_80", cache)


def test_second_compilation_comes_from_the_cache(scale, cache, monkeypatch):
    spec = scale(DType.FP16, 64)
    first = compile_spec(spec, "sm_80", cache)
    monkeypatch.setattr(compiler, "_compile", None)  # would raise if it were called
    assert compile_spec(spec, "sm_80", KernelCache(cache.directory)) == first


def test_damaged_cache_file_is_compiled_again(scale, cache):
    spec = scale(DType.F32, 64)
    first = compile_spec(spec, "sm_80", cache)
    (path,) = cache.directory.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert compile_spec(spec, "sm_80", cache) == first
    assert cache.get(cache_key(spec, "sm_80")) == first


def test_key_changes_with_everything_that_matters(scale, tmp_path, monkeypatch):
    spec = scale(DType.F32, 64)
    keys = [cache_key(spec, "sm_80"), cache_key(spec, "sm_90a")]
    keys.append(cache_key(scale(DType.F32, 128), "sm_80"))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 99))
    keys.append(cache_key(spec, "sm_80"))
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-lineinfo"))
    keys.append(cache_key(spec, "sm_80"))
    (tmp_path / "value.cuh").write_text("#pragma once\n#define FACTOR 3.f\n")  # not direct
    keys.append(cache_key(spec, "sm_80"))
    (tmp_path / "scale.cu").write_text(SCALE + "\n")
    keys.append(cache_key(spec, "sm_80"))
    assert len(set(keys)) == len(keys)
    assert cache_key(spec, "sm_80") == keys[-1]


def test_keys_of_many_kernels_read_a_source_once(scale, monkeypatch):
    specs, digests, read = [scale(DType.F32, 32 * n) for n in (1, 2, 3)], {}, []
    digest = compiler._source_digest
    monkeypatch.setattr(compiler, "_source_digest", lambda p: read.append(p) or digest(p))
    keys = [cache_key(spec, "sm_80", digests) for spec in specs]
    assert len(read) == 1
    assert keys == [cache_key(spec, "sm_80") for spec in specs] and len(set(keys)) == 3


def test_compile_all_in_threads_compiles_each_spec_once(scale, cache):
    specs = [scale(DType.F32, 32 * n) for n in (1, 2, 3, 4, 1, 2)]
    with recording() as recorder:
        compiled = compile_all(specs, "sm_80", jobs=3, kernel_cache=cache)
    assert [k.resources.static_smem for k in compiled.values()] == [128, 256, 384, 512]
    runs = [c for c in recorder.calls if c.name == "nvrtcCompileProgram"]
    assert len(runs) == 4 and {c.phase for c in runs} == {"compile"}


def test_compile_all_reports_the_error(scale, cache, tmp_path):
    (tmp_path / "broken.cu").write_text("__global__ void broken(int n) { oops; }")
    broken = Kernel(str(tmp_path / "broken.cu"), "broken", "i32 n")
    with pytest.raises(CompileError, match="oops"):
        compile_all([scale(DType.F32, 32), broken(), scale(DType.F32, 64)], "sm_80", 2, cache)


def test_same_spec_from_many_threads(scale, cache):
    spec = scale(DType.F32, 96)
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(lambda _: compile_spec(spec, "sm_80", cache), range(8)))
    assert len(results) == 1
    assert len(list(cache.directory.iterdir())) == 1
