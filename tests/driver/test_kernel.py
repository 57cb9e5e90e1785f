import itertools
import threading
import time

import numpy as np
import pytest

from tinyvllm.driver import compile_queue, compiler, kernel
from tinyvllm.driver.cache import CompiledKernel, KernelCache
from tinyvllm.driver.calls import CudaError
from tinyvllm.driver.device import Device
from tinyvllm.driver.kernel import (
    KernelLoader,
    LoadedKernel,
    PreparedLaunch,
    _check_limits,
    _packing,
)
from tinyvllm.driver.memory import MemPool, copy_to_host, memset
from tinyvllm.driver.recorder import recording
from tinyvllm.driver.spec import Kernel
from tinyvllm.util import InputError

MIX = """
// Every parameter type, and dynamic shared memory that a launch has to ask for.
template <int kBlock>
__global__ void mix(double* out, int a, unsigned b, long long c, unsigned long long d, float e) {
  extern __shared__ unsigned words[];
  const int last = int(d >> 32);
  if (threadIdx.x == 0) words[last] = 5;
  __syncthreads();
  if (threadIdx.x == kBlock - 1) {
    double* o = out + 6 * blockIdx.x;
    o[0] = a, o[1] = b, o[2] = double(c), o[3] = double(d), o[4] = e, o[5] = words[last];
  }
}
"""
KERNEL = Kernel("mix.cu", "mix", "ptr out, i32 a, u32 b, i64 c, u64 d, f32 e")
ARGS = {"out": 4096, "a": -1, "b": 2**32 - 1, "c": -(2**40), "d": 2**63, "e": 0.5}
LIMITS = LoadedKernel(None, None, 256, 1024, 0, *_packing(KERNEL))


def test_arguments_are_packed_with_their_types():
    launch = KERNEL(64).launch((1,), 64, **ARGS)
    block = PreparedLaunch(launch, LIMITS)._block
    values = np.frombuffer(block, np.uint8).reshape(2, 6, 8)[1]
    assert values[0].view(np.uint64)[0] == 4096
    assert values[1].view(np.int32)[0] == -1
    assert values[2].view(np.uint32)[0] == 2**32 - 1
    assert values[3].view(np.int64)[0] == -(2**40)
    assert values[4].view(np.uint64)[0] == 2**63
    assert values[5].view(np.float32)[0] == 0.5
    pointers = np.frombuffer(block, np.uint64)[:6]
    assert (np.diff(pointers.astype(np.int64)) == 8).all()


@pytest.mark.parametrize(
    "change", [{"a": 2**31}, {"b": -1}, {"c": 2**63}, {"out": None}, {"a": 1.5}, {"e": "1"}]
)
def test_argument_out_of_range_is_named(change):
    launch = KERNEL(64).launch((1,), 64, **{**ARGS, **change})
    (name,) = change
    with pytest.raises(InputError, match=rf"mix<64>, grid \(1, 1, 1\).*: {name}="):
        PreparedLaunch(launch, LIMITS)


@pytest.mark.parametrize(
    "grid, block, smem, limit",
    [
        ((0,), 64, 0, "2147483647"),
        ((1, 65536), 64, 0, "65535"),
        ((1,), 257, 0, "256 threads"),
        ((1,), 0, 0, "256 threads"),
        ((1,), 64, 99 * 1024, "101376 bytes"),
    ],
)
def test_launch_beyond_a_limit_is_refused(grid, block, smem, limit):
    launch = KERNEL(64).launch(grid, block, smem=smem, **ARGS)
    with pytest.raises(InputError, match=limit):
        _check_limits(launch, LIMITS, 99 * 1024)


@pytest.mark.parametrize("cluster", [0, 3, 16])
def test_cluster_must_divide_the_grid_and_be_small(cluster):
    launch = KERNEL(64).launch((16,), 64, cluster=cluster, **ARGS)
    with pytest.raises(InputError, match=f"clusters of {cluster} blocks: must be from 1 to 8"):
        _check_limits(launch, LIMITS, 99 * 1024)


def test_launch_attributes_say_what_the_launch_says():
    for cluster, pdl in ((1, False), (1, True), (4, False), (4, True)):
        launch = KERNEL(64).launch((16,), 64, cluster=cluster, **ARGS)
        config = PreparedLaunch(launch, LIMITS, pdl)._config
        found = {a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): a.value for a in config.attrs}
        assert config.numAttrs == len(found) == (cluster > 1) + pdl
        if pdl:
            assert found["PROGRAMMATIC_STREAM_SERIALIZATION"].programmaticStreamSerializationAllowed
        if cluster > 1:
            size = found["CLUSTER_DIMENSION"].clusterDim
            assert (size.x, size.y, size.z) == (4, 1, 1)


@pytest.fixture
def fake_loader(fake_driver, monkeypatch, tmp_path):
    """A loader of kernels that a compiler has names for, its cache, and what was compiled."""
    made = []

    def compiled(spec, arch, cache):
        made.append(spec)
        kernel = CompiledKernel(b"code", spec.name, None)
        cache.put(f"{spec.name} {arch}", kernel)
        return kernel

    monkeypatch.setattr(compile_queue, "compile_spec", compiled)
    monkeypatch.setattr(compiler, "cache_key", lambda spec, arch, digests: f"{spec.name} {arch}")
    monkeypatch.setattr(kernel, "arch_name", lambda capability: "sm_90a")
    for name in ("cuModuleLoadData", "cuModuleGetFunction"):
        monkeypatch.setattr(fake_driver, name, fake_driver.handle, raising=False)
    monkeypatch.setattr(fake_driver, "cuFuncGetAttribute", lambda *a: (0, 1024), raising=False)
    with Device() as device, KernelLoader(device, KernelCache(tmp_path)) as loader:
        yield loader, made, fake_driver.names


def test_what_the_cache_has_is_loaded_when_requested_the_rest_when_needed(fake_loader):
    loader, made, names = fake_loader
    specs = [KERNEL(n) for n in range(32, 40)]
    loader.load_all(specs[:3])
    assert made == specs[:3] and names.count("cuModuleLoadData") == 3
    with KernelLoader(loader.device, loader._cache) as second:
        second.request(iter([*specs, *specs]))
        assert names.count("cuModuleLoadData") == 6
        second.load_all([specs[4]])
        assert names.count("cuModuleLoadData") == 7
        second.load_all(specs[:5])
        second.load_requested()
        assert names.count("cuModuleLoadData") == 11 and set(made) == set(specs)
        assert len(made) == len(specs), "each is compiled once"
        second.load_requested()
    assert names.count("cuModuleUnload") == 8


def test_what_is_requested_later_is_loaded_beside_the_caller_s_own(fake_loader, monkeypatch):
    monkeypatch.setattr(kernel, "LATER", 0.05)
    loader, made, names = fake_loader
    specs = [KERNEL(n) for n in range(32, 40)]
    loader.load_all(specs[:4])
    with KernelLoader(loader.device, loader._cache) as second:
        second.request_later(iter(specs))
        assert names.count("cuModuleLoadData") == 4, "not at once"
        second.load_all(specs[2:5])
        second._later.join()
        second.load_requested()
        assert names.count("cuModuleLoadData") == 12 and len(made) == 8, "each is loaded once"
    assert names.count("cuModuleUnload") == 8


@pytest.fixture
def before_load(fake_driver, monkeypatch):
    """What a thread does just before it loads a kernel, by the thread's name."""
    monkeypatch.setattr(kernel, "LATER", 0)
    actions = {}

    def load(image):
        actions.get(threading.current_thread().name, lambda: None)()
        return fake_driver.handle()

    monkeypatch.setattr(fake_driver, "cuModuleLoadData", load, raising=False)
    return actions


@pytest.mark.parametrize("looking", [True, False])
def test_a_kernel_that_both_threads_want_is_loaded_once(fake_loader, before_load, looking):
    """The other thread is just `looking` into the cache, or loading, when a step needs it."""
    loader, _, names = fake_loader
    loader.load_all([KERNEL(32)])
    entered, needed = threading.Event(), threading.Event()

    def wait():
        entered.set()
        assert needed.wait(5)

    class SlowCache(KernelCache):
        def get(self, key):
            found = super().get(key)
            if looking and threading.current_thread().name == "later-kernels":
                wait()
            return found

    before_load["later-kernels"] = lambda: looking or wait()
    with KernelLoader(loader.device, SlowCache(loader._cache.directory)) as second:
        second.request_later([KERNEL(32)])
        assert entered.wait(5) and KERNEL(32) not in second._loaded
        if not looking:
            threading.Timer(0.05, needed.set).start()
        second.load_all([KERNEL(32)])
        assert KERNEL(32) in second._loaded
        needed.set()
        second._later.join()
    assert names.count("cuModuleLoadData") == 2, "once by each loader"


def test_a_kernel_that_a_step_is_just_loading_is_not_loaded_again(fake_loader, before_load):
    loader, made, names = fake_loader

    def meanwhile():
        loader.request_later([KERNEL(32)])
        time.sleep(0.05)

    before_load[threading.current_thread().name] = meanwhile
    loader.load_all([KERNEL(32)])
    loader._later.join()
    assert len(made) == names.count("cuModuleLoadData") == 1


def test_an_error_of_the_thread_is_logged_and_steps_load_what_they_need(
    fake_loader, before_load, caplog
):
    loader, _, _ = fake_loader
    specs = [KERNEL(n) for n in range(32, 35)]
    loader.load_all(specs)

    def fail():
        raise CudaError("cuModuleLoadData", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory", ())

    before_load["later-kernels"] = fail
    with KernelLoader(loader.device, loader._cache) as second:
        second.request_later(specs)
        second._later.join()
        assert "only when a step needs them" in caplog.text and "OUT_OF_MEMORY" in caplog.text
        second.load_all(specs)
        assert set(second._loaded) == set(specs)


def test_what_is_requested_later_ends_with_the_loader(fake_loader, monkeypatch):
    loader, _, _ = fake_loader
    taken = threading.Semaphore(0)

    def endless():
        for n in itertools.count(1):
            taken.release()
            yield KERNEL(32 * n)

    def opened(later, busy, pause):
        for name, seconds in (("LATER", later), ("BUSY", busy), ("PAUSE", pause)):
            monkeypatch.setattr(kernel, name, seconds)
        return KernelLoader(loader.device, loader._cache)

    with opened(0, 0.0005, 0.002) as working:
        working.request_later(endless())
        assert all(taken.acquire(timeout=5) for _ in range(3))
    assert not working._later.is_alive()
    while taken.acquire(blocking=False):
        pass
    with opened(0, 0, 60) as resting:
        resting.request_later(endless())
        assert taken.acquire(timeout=5) and not taken.acquire(timeout=0.05)
    with opened(60, 0, 0) as waiting:
        waiting.request_later(endless())
    assert not taken.acquire(blocking=False)


def test_what_is_requested_later_ends_with_the_main_thread(fake_loader, monkeypatch, caplog):
    """Of a program that leaves its engine open."""
    loader, _, _ = fake_loader
    monkeypatch.setattr(kernel, "LATER", 0)
    main, begun = threading.Event(), threading.Event()
    main.is_alive = lambda: not main.is_set()

    def endless():
        for n in itertools.count(1):
            begun.set()
            yield KERNEL(32 * n)

    with monkeypatch.context() as patch, KernelLoader(loader.device, loader._cache) as opened:
        patch.setattr(threading, "main_thread", lambda: main)
        opened.request_later(endless())
        assert begun.wait(5) and opened._later.is_alive()
        main.set()
        opened._later.join(5)
        assert not opened._later.is_alive() and not opened._closing.is_set()
    assert caplog.text == ""


@pytest.fixture
def mix(tmp_path):
    (tmp_path / "mix.cu").write_text(MIX)
    return Kernel(str(tmp_path / "mix.cu"), "mix", KERNEL.signature)(64)


@pytest.fixture
def loader(device):
    with KernelLoader(device) as opened:
        yield opened


@pytest.fixture
def out(device, stream):
    """Room for the results of ten blocks."""
    with MemPool(device, 0, max_bytes=32 << 20) as pool:
        ptr = pool.alloc(6 * 8 * 10, stream)
        memset(ptr, 0xFF, 6 * 8 * 10, stream)
        yield ptr
        stream.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("last", [0, 11_000, 20_000])  # 44 KB needs no permission, 80 KB does
def test_launch_passes_every_type_and_shared_memory(mix, loader, out, stream, last):
    args = {**ARGS, "out": out, "d": (last << 32) + 7}
    prepared = loader.prepare(mix.launch((10,), 64, smem=4 * (last + 1), **args))
    for _ in range(3):
        prepared.run(stream)
    values = np.empty((10, 6))
    copy_to_host(values, out, stream)
    stream.synchronize()
    expected = [-1, 2**32 - 1, -(2**40), (last << 32) + 7, 0.5, 5]
    assert (values == expected).all()


@pytest.mark.gpu
def test_running_costs_one_driver_call(mix, loader, out, stream):
    prepared = loader.prepare(mix.launch((1,), 64, smem=256, **{**ARGS, "out": out, "d": 1}))
    with recording() as recorder:
        prepared.run(stream)
    (made,) = recorder.calls
    assert made.name == "cuLaunchKernelEx"
    assert (made.args["kernel"], made.args["grid"]) == ("mix<64>", [1, 1, 1])
    assert made.args["arguments"] == {**ARGS, "out": hex(out), "d": 1}
    config = prepared._config
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (1, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 1, 1)
    assert config.sharedMemBytes == 256
    stream.synchronize()


@pytest.mark.gpu
def test_blocks_of_a_cluster_reach_each_others_shared_memory(device, loader, out, stream, tmp_path):
    if device.info.compute_capability < (9, 0):
        pytest.skip("clusters begin with compute capability 9.0")
    source = """
    #include "cluster.cuh"
    __global__ void ring(float* out) {
      __shared__ float2 mine;
      mine = {float(blockIdx.x), 0.0f};
      cluster_sync();
      const int next = (blockIdx.x + 1) % 4;
      const u32 address = static_cast<u32>(__cvta_generic_to_shared(&mine));
      out[2 * blockIdx.x] = load_from_rank(address, next, true).x;
      out[2 * blockIdx.x + 1] = load_from_rank(address, next, false).x;
      cluster_sync();
    }"""
    (tmp_path / "ring.cu").write_text(source)
    spec = Kernel(str(tmp_path / "ring.cu"), "ring", "ptr out")()
    loader.prepare(spec.launch((8,), 1, cluster=4, out=out)).run(stream)
    values = np.empty((8, 2), np.float32)
    copy_to_host(values, out, stream)
    stream.synchronize()
    assert (values == [[n, 0] for n in (1, 2, 3, 0, 5, 6, 7, 4)]).all()


@pytest.mark.gpu
def test_refused_launch_names_the_kernel(mix, loader, out, stream):
    launch = mix.launch((1,), 64, smem=256, **{**ARGS, "out": out, "d": 1})
    prepared = loader.prepare(launch)
    prepared._config.sharedMemBytes = 1 << 20  # past the check, for the driver to refuse
    with pytest.raises(CudaError, match=r"mix<64>, grid \(1, 1, 1\)"):
        prepared.run(stream)
