"""The launches of whole programs as they reach the driver, next to each worked out by itself."""

import ctypes
import random
import struct
from contextlib import closing
from dataclasses import replace

import pytest

from tinyvllm.driver import kernel as driver_kernel
from tinyvllm.driver import repeated
from tinyvllm.driver.device import Device
from tinyvllm.driver.kernel import LoadedKernel, _packing
from tinyvllm.driver.repeated import RepeatedLaunch, moved
from tinyvllm.driver.spec import Kernel, TensorMap
from tinyvllm.engine.batch import step_limits
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.pool import DevicePool
from tinyvllm.model.presets import PRESETS
from tinyvllm.model.programs import step_program
from tinyvllm.model.weights import packed_weights, place_weights
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.ops.launches import BoundOp, Place, ProgramLaunches, SizesRead, alike
from tinyvllm.ops.lower import lower
from tinyvllm.ops.program import INPUT, OUTPUT, Buffer, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.util import DType, InputError

MODEL = replace(PRESETS["llama-3.2-1b"], num_hidden_layers=3, vocab_size=1000)
LIMITS = step_limits(64, 512, 2048, 16) | {"NB": 4}
MIXED = Kernel("a.cu", "a", "ptr x, i32 n, map m, f32 eps, i64 k, map fixed")


class Loader:
    """Kernels whose functions are numbers; `specs` are those that were loaded."""

    pdl = True

    def __init__(self):
        self.specs = []

    def load_all(self, specs):
        self.specs += [spec for spec in specs if spec not in self.specs]

    def kernel(self, launch):
        self.load_all([launch.spec])
        packer, offsets = _packing(launch.spec.kernel)
        return LoadedKernel(None, self.specs.index(launch.spec), 1024, 0, 0, packer, offsets)

    def prepare(self, launch):
        return driver_kernel.PreparedLaunch(launch, self.kernel(launch), launch.pdl)


@pytest.fixture
def loader():
    return Loader()


@pytest.fixture
def launched(fake_driver, monkeypatch, loader):
    """The launches that reach the driver: all that they were given."""
    calls = []

    def launch(config, function, pointers, extra):
        params = loader.specs[function].kernel.params
        addresses = (ctypes.c_uint64 * len(params)).from_address(pointers)
        sizes = [128 if kind == "map" else 8 for kind, _ in params]
        args = [ctypes.string_at(a, size) for a, size in zip(addresses, sizes, strict=True)]
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        # What a structure prints holds addresses of its own.
        clusters = [a.value.clusterDim.x for a in config.attrs if "CLUSTER" in a.id.name]
        size = grid, config.blockDimX, config.sharedMemBytes, int(config.hStream)
        calls.append((function, *size, config.numAttrs, clusters, args))
        return 0

    def encode(tensor_map):
        return struct.pack("<16Q", *[tensor_map.ptr, tensor_map.rows, tensor_map.box_rows] * 5, 0)

    fake_driver.cuLaunchKernelEx = launch
    monkeypatch.setattr(driver_kernel, "encode", encode)
    monkeypatch.setattr(repeated, "encode", encode)
    return calls


def sizes(rng, phase):
    """Sizes of a step as an engine makes them."""
    decodes, prompts = rng.choice([1, 7, 64]), rng.randint(1, 3)
    dims = {"Q": 0, "C": rng.choice([256, 2048])}
    if phase == "decode":
        return {**dims, **dict.fromkeys("TRSD", decodes), "R1": decodes + 1}
    decodes = min(rng.choice([0, decodes]), 60)
    tokens, rows = decodes + rng.randint(3, 400), decodes + prompts
    dims |= {"T": tokens, "R": rows, "R1": rows + 1, "D": decodes, "Q": rng.choice([256, 512])}
    return {**dims, "S": rng.randint(decodes, rows), "CP": rng.choice([0, 0, 2])}


@pytest.mark.parametrize("path", ["auto", "portable"])
@pytest.mark.parametrize("sampler", ["plain", "adjust"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_moved_launches_are_those_worked_out_for_each_op(launched, loader, path, sampler, phase):
    program = step_program(MODEL, "step", block_size=16, phase=phase, sampler=sampler)
    program = lower(program, phase)
    packed = packed_weights([program])
    weights, _ = place_weights(packed, DType.BF16, 1 << 20)
    rng = random.Random(0)
    with (
        Device(kernel_path=path) as device,
        driver_kernel.Stream() as stream,
        DevicePool(device, 1 << 30) as pool,
    ):
        executor = CudaExecutor(
            [program],
            weights,
            LIMITS,
            act=DType.BF16,
            info=device.info,
            pool=pool,
            loader=loader,
            stream=stream,
        )
        for _ in range(12):
            dims = sizes(rng, phase)
            launched.clear()
            executor.run("step", dims, {}, ()).discard()
            have = launched.copy()
            launched.clear()
            for _, launches in executor.launches_by_op("step", dims):
                for launch in launches:
                    launch.run(stream)
            assert have == launched
            assert len(have) > 3 * 7
        executor.close()


def test_the_first_launch_does_not_wait_for_the_others_to_be_worked_out(fake_driver):
    """But all kernels are compiled before it, side by side, when a program first runs."""
    log = []

    class Bound:
        def __init__(self, name):
            self.name = name

        def launches(self, dims):
            log.append(f"work out {self.name} of {dims['T']}")
            return [Kernel(f"{self.name}.cu", self.name, "i32 n")().launch((1,), 32, n=dims["T"])]

    class Loads(Loader):
        def load_all(self, specs):
            missing = list(specs)
            log.append(f"load {len(missing)}")

        def kernel(self, launch):
            packer, offsets = _packing(launch.spec.kernel)
            return LoadedKernel(None, launch.spec.kernel.entry, 1024, 0, 0, packer, offsets)

    fake_driver.cuLaunchKernelEx = lambda config, function, *_: log.append(f"run {function}") or 0
    p = Program("t")
    p.buffer("x", ("T", 16), kind=INPUT)
    p.emit("silu_mul", "y", gate="x", up="x")
    p.emit("add", "z", a="y", b="x", out_kind=OUTPUT)
    with Device(), driver_kernel.Stream() as stream:
        launches = ProgramLaunches(p, [Bound("one"), Bound("two")], Loads(), stream)
        launches.run({"T": 3})
        assert log[:3] == ["work out one of 3", "work out two of 3", "load 2"]
        log.clear()
        launches.run({"T": 4})
    two = [entry for entry in log if "two" in entry]
    assert log.index("run one") < log.index(two[0])
    assert not any("load" in entry for entry in log)


def test_prepared_launches_only_run(fake_driver):
    worked_out, ran = [], []

    class Bound:
        def launches(self, dims):
            worked_out.append(dims["T"])
            return [Kernel("one.cu", "one", "ptr x")().launch((1,), 32, x=64)]

    fake_driver.cuLaunchKernelEx = lambda *_: ran.append(1) or 0
    p = Program("t")
    p.buffer("x", ("T", 16), kind=INPUT)
    p.emit("silu_mul", "y", gate="x", up="x", out_kind=OUTPUT)
    with Device(), driver_kernel.Stream() as stream:
        launches = ProgramLaunches(p, [Bound()], Loader(), stream)
        launches.prepare({"T": 3})
        assert worked_out and not ran
        worked_out.clear()
        launches.run({"T": 3})
    assert len(ran) == 1 and not worked_out


@pytest.mark.parametrize(("tokens", "num_launches"), [(0, 0), (1, 1)])
def test_an_op_that_writes_nothing_has_no_launches(fake_driver, monkeypatch, tokens, num_launches):
    monkeypatch.setattr(op_def("silu_mul"), "launches", lambda a, info: [a.y.shape])
    p = Program("t")
    p.buffer("x", ("T", 16), kind=INPUT)
    p.emit("silu_mul", "y", gate="x", up="x", out_kind=OUTPUT)
    place = Place(4096, ("T", 16), DType.BF16)
    with Device() as device:
        op = BoundOp(p, p.ops[0], lambda _: place, act=DType.BF16, info=device.info, scratch=0)
    assert len(op.launches({"T": tokens})) == num_launches


def test_columns_of_columns_keep_the_stride_of_the_whole():
    place = Place(4096, ("T", 16), DType.BF16, max_rows=9)
    half = place.columns(8, 8)
    assert half == Place(4096 + 8 * 2, ("T", 8), DType.BF16, row_stride=16, max_rows=9)
    part = Place(4096 + 10 * 2, ("T", 6), DType.BF16, row_stride=16, max_rows=9)
    assert half.columns(2, 6) == part
    array = part.array({"T": 5})
    assert (array.ptr, array.shape, array.row_stride, array.max_rows) == (4116, (5, 6), 16, 9)


def test_columns_of_a_buffer_that_lies_elsewhere_are_found(launched, loader):
    p = Program("t")
    p.buffer("both", ("T", 16), kind=INPUT)
    p.buffers["gate"] = Buffer("gate", ("T", 8), None, parent="both", column=0)
    p.buffers["up"] = Buffer("up", ("T", 8), None, parent="both", column=8)
    p.emit("silu_mul", "y", gate="gate", up="up", out_kind=OUTPUT)
    with (
        Device() as device,
        driver_kernel.Stream() as stream,
        DevicePool(device, 1 << 30) as pool,
        closing(
            CudaExecutor(
                [p],
                {"both": DeviceArray(4096, (4, 16), DType.BF16)},
                {"T": 4},
                act=DType.BF16,
                info=device.info,
                pool=pool,
                loader=loader,
                stream=stream,
            )
        ) as executor,
    ):
        executor.run("t", {"T": 4}, {}, ()).discard()
    ((*_, args),) = launched
    assert [int.from_bytes(arg, "little") for arg in args[:2]] == [4096, 4096 + 16]


def mixed(ptr, n, map_ptr, k, *, grid=4, pdl=True, cluster=1, **change):
    m = TensorMap(map_ptr, DType.BF16, 64, 64, 64, 16, 64)
    fixed = replace(m, ptr=512)
    args = {"x": ptr, "n": n, "m": m, "eps": 0.5, "k": k, "fixed": fixed} | change
    return MIXED().launch((grid,), 32, pdl=pdl, cluster=cluster, **args)


def test_addresses_and_integers_move_and_tensor_maps_by_their_address(
    launched, loader, fake_stream
):
    first, other = mixed(1000, 5, 4096, -7), mixed(3000, 6, 1024, -9)
    moves = [[0] * 6, moved(first, other)]
    assert moves[1] == [2000, 1, -3072, 0, -2, 0]
    launches = RepeatedLaunch(loader, first, moves)
    for change, grid in ((0, 4), (640, 8)):
        now = mixed(1000 + change, 5 + change, 4096, -7, grid=grid)
        launches.set(now, fake_stream)
        launched.clear()
        launches.run(1)
        loader.prepare(mixed(3000 + change, 6 + change, 1024, -9, grid=grid)).run(fake_stream)
        assert launched[0] == launched[1]


@pytest.mark.parametrize(
    "other",
    [
        mixed(1000, 5, 4096, -7, grid=5),
        mixed(1000, 5, 4096, -7, cluster=2),
        mixed(1000, 5, 4096, -7, eps=0.25),
        mixed(1000, 5, 4096, -7, m=TensorMap(4096, DType.BF16, 32, 64, 64, 16, 64)),
    ],
)
def test_launches_that_differ_in_more_than_addresses_do_not_move(other):
    assert moved(mixed(1000, 5, 4096, -7), other) is None


def test_argument_out_of_range_is_named(launched, loader, fake_stream):
    launches = RepeatedLaunch(loader, mixed(0, 1, 256, 0), [[0] * 6])
    with pytest.raises(InputError, match=r"a, grid \(4, 1, 1\).*: n=2147483648 is no i32"):
        launches.set(mixed(0, 1 << 31, 256, 0), fake_stream)


def test_layers_are_alike_and_what_differs_is_not():
    program = lower(step_program(MODEL, "step", block_size=16), "prefill")
    groups = {program.ops[group[0]].kind: group for group in alike(program)}
    assert len(groups["attention"]) == 3
    assert [program.ops[i].attrs["layer"] for i in groups["attention"]] == [0, 1, 2]
    assert sorted(i for group in alike(program) for i in group) == list(range(len(program.ops)))
    norms = [g for g in alike(program) if program.ops[g[0]].kind == "rms_norm"]
    # Before attention, after it, and of the sampled rows.
    assert sorted(map(len, norms)) == [1, 3, 3]


def test_sizes_that_were_read_are_known_and_others_cannot_be_listed():
    read = SizesRead({"T": 5, "R": 2})
    assert read["T"] == 5
    assert read.read == {"T": 5}
    with pytest.raises(TypeError, match="by name only"):
        dict(read)
