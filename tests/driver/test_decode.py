"""What the bindings' own arguments and results become; the bindings need no driver for that."""

import pytest

from tinyvllm.driver.calls import driver_api
from tinyvllm.driver.decode import Decoder, forget_kernel, name_kernel
from tinyvllm.driver.kernel import LoadedKernel, PreparedLaunch, _packing
from tinyvllm.driver.spec import Kernel

cu = driver_api()
KERNEL = Kernel("norm.cu", "norm", "ptr x, u32 u, i64 n, u64 seed, i32 K, f32 eps")


@pytest.fixture
def decoder():
    return Decoder()


def test_arguments_have_the_documented_names(decoder):
    args = (cu.CUdeviceptr(4096), 8192, 12, cu.CUstream(6))
    assert decoder.arguments("cuMemcpyHtoDAsync", args) == {
        "dstDevice": "0x1000",
        "srcHost": "0x2000",
        "ByteCount": 12,
        "hStream": "stream 1",
    }
    assert decoder.arguments("cuCtxSynchronize", ()) == {}


def test_pool_attributes_and_flags_have_names(decoder):
    key = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    args = (cu.CUmemoryPool(5), key, cu.cuuint64_t(1 << 33))
    assert decoder.arguments("cuMemPoolSetAttribute", args) == {
        "pool": "pool 1",
        "attr": "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD",
        "value": 1 << 33,
    }
    assert decoder.arguments("cuStreamCreate", (1,)) == {"Flags": "CU_STREAM_NON_BLOCKING"}
    assert decoder.arguments("cuEventCreate", (2,)) == {"Flags": "CU_EVENT_DISABLE_TIMING"}


def test_structures_show_the_fields_that_are_set(decoder):
    props = cu.CUmemPoolProps()
    props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.maxSize = 1 << 30
    shown = decoder.arguments("cuMemPoolCreate", (props,))["poolProps"]
    assert shown["allocType"] == "CU_MEM_ALLOCATION_TYPE_PINNED"
    assert shown["location"] == {"type": "CU_MEM_LOCATION_TYPE_DEVICE"}
    assert shown["maxSize"] == 1 << 30
    copy = cu.CUDA_MEMCPY2D()  # with enumerations that are at no member
    copy.srcHost, copy.WidthInBytes = 4096, 16
    assert decoder.arguments("cuMemcpy2DAsync", (copy, cu.CUstream(1)))["pCopy"] == {
        "srcHost": "0x1000",
        "WidthInBytes": 16,
    }


def test_handles_are_numbered_by_kind_and_anew_when_made_again(decoder):
    def event(handle):
        return decoder.arguments("cuEventRecord", (cu.CUevent(handle), cu.CUstream(7)))["hEvent"]

    assert decoder.result("cuEventCreate", (cu.CUevent(7),)) == "event 1"
    assert decoder.result("cuEventCreate", (cu.CUevent(8),)) == "event 2"
    assert (event(7), event(8)) == ("event 1", "event 2")
    assert decoder.result("cuEventCreate", (cu.CUevent(7),)) == "event 3", "destroyed meanwhile"
    assert event(7) == "event 3"


def test_results(decoder):
    assert decoder.result("cuNothing", ()) is None
    assert decoder.result("cuMemGetInfo", (1, 2)) == (1, 2)
    assert decoder.result("cuDeviceGetName", (b"NVIDIA H200\0\0\0",)) == "NVIDIA H200"
    assert decoder.result("cuMemHostAlloc", (1 << 20,)) == "0x100000"
    assert decoder.result("cuMemAllocFromPoolAsync", (cu.CUdeviceptr(1 << 20),)) == "0x100000"


def test_long_and_binary_bytes_are_told_by_their_length(decoder):
    args = (b"x" * 1000, b"a.cu", 0, [], [])
    shown = decoder.arguments("nvrtcCreateProgram", args)
    assert (shown["src"], shown["name"]) == ("<1000 bytes>", "a.cu")
    assert decoder.arguments("cuModuleLoadData", (b"\x7fELF\xff\0",)) == {"image": "<6 bytes>"}
    options = decoder.arguments("nvrtcCompileProgram", (None, 1, [b"-arch=sm_90a"]))["options"]
    assert options == ["-arch=sm_90a"]
    assert decoder.arguments("nvrtcGetCUBIN", (None, bytearray(5)))["cubin"] == "<5 bytes>"


def test_long_lists_are_cut(decoder):
    sizes = list(range(20))
    shown = decoder.arguments("cuMemcpyBatchAsync", ([], [], sizes, 20, [], [], 0, None))["sizes"]
    assert shown == [*range(16), "... 4 more"]


def test_a_launch_is_read_as_the_driver_reads_it(decoder):
    function = cu.CUfunction(4660)
    values = {"x": 1 << 40, "u": 2**32 - 1, "n": -5, "seed": 2**63, "K": -7, "eps": 0.5}
    launch = KERNEL(64).launch((7, 2), 128, smem=4096, **values)
    loaded = LoadedKernel(None, function, 1024, 0, 0, *_packing(KERNEL))
    prepared = PreparedLaunch(launch, loaded, pdl=True)
    prepared._config.hStream = cu.CUstream(9)
    args = (prepared._config, prepared._function, prepared._pointers, 0)
    name_kernel(function, KERNEL(64))
    try:
        assert decoder.arguments("cuLaunchKernelEx", args) == {
            "kernel": "norm<64>",
            "grid": [7, 2, 1],
            "block": [128, 1, 1],
            "sharedMemBytes": 4096,
            "hStream": "stream 1",
            "attributes": ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"],
            "arguments": {**values, "x": "0x10000000000"},
        }
        key = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        assert decoder.arguments("cuFuncGetAttribute", (key, function))["hfunc"] == "norm<64>"
    finally:
        forget_kernel(function)
    assert decoder.arguments("cuFuncGetAttribute", (key, function))["hfunc"] == "function 1"
