"""The CUDA backend: sleep, waking after failures, memory in a step. On a fake driver, and a GPU.

On the fake driver kernels do nothing, so every token is 0; copies and allocations are real.
"""

import ctypes
import random
import shutil

import pytest
from driving import run as run_queued
from driving import tokens_of

from tinyvllm import LLM, SamplingParams
from tinyvllm.config import EngineConfig
from tinyvllm.driver.calls import CudaError
from tinyvllm.driver.kernel import LoadedKernel, _packing
from tinyvllm.driver.recorder import recording
from tinyvllm.engine import cuda_backend
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.memory.pool import OutOfMemoryError
from tinyvllm.util import InputError

SIZES = {
    "device": "cuda",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "block_size": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=2)
PROMPTS = [[5 + i, 6, 7, 8, 9, 10, 11, 12, 13] for i in range(3)]


def run(engine, prompts, params=GREEDY):
    return run_queued(engine, prompts, params)


class IdleLaunch:
    def run(self, stream):
        pass


class FakeLoader:
    """Kernels that do nothing, and so need not be compiled."""

    pdl = True

    def __init__(self, device):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def request(self, specs):
        list(specs)

    def request_later(self, specs):
        self.request(specs)

    def load_all(self, specs):
        pass

    def prepare(self, launch):
        return IdleLaunch()

    def kernel(self, launch):
        return LoadedKernel(None, 0, 1024, 0, 0, *_packing(launch.spec.kernel))


@pytest.fixture
def fake_gpu(fake_driver, monkeypatch):
    monkeypatch.setattr(cuda_backend, "KernelLoader", FakeLoader)
    fake_driver.limit = 256 << 20
    return fake_driver


@pytest.fixture
def model(golden, tmp_path):
    """A copy of a golden model, whose files a test may move away."""
    return shutil.copytree(golden / "llama_bias", tmp_path / "model")


@pytest.fixture
def engine(fake_gpu, model):
    opened = LLMEngine(EngineConfig(model=str(model), **SIZES))
    yield opened
    opened.close()
    assert (fake_gpu.used, fake_gpu.pinned, fake_gpu.blocks) == (0, 0, {})


def weights(engine):
    """The bytes of all weights, as they lie on the (fake) device."""
    return ctypes.string_at(engine.backend._base, engine.backend.memory.weights)


def held(driver):
    return driver.used, driver.pinned


def test_what_is_allocated_is_what_is_planned(engine, fake_gpu):
    """But for the temporaries, which come and go, and what rounds the parts up."""
    memory, arrays = engine.backend.memory, engine.backend.executor.buffers.arrays
    planned = memory.weights + memory.arenas + memory.state + memory.kv
    assert 0 <= planned - fake_gpu.used < 256 * len(arrays)


FREED_BY = {
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
    "cuStreamCreate": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuMemPoolCreate": "cuMemPoolDestroy",
    "cuMemHostAlloc": "cuMemFreeHost",
}


@pytest.mark.parametrize(
    ("refused", "step"),
    [
        ("cuDevicePrimaryCtxRetain", 1),
        ("cuStreamCreate", 1),
        ("cuEventCreate", 5),
        ("cuMemPoolCreate", 1),
        ("cuMemPoolSetAttribute", 1),
        ("cuMemHostAlloc", 3),
    ],
)
def test_an_engine_that_cannot_be_opened_leaves_nothing(fake_gpu, model, refused, step):
    """One of the calls of a function fails, and those after it."""
    for count in range(0, 100, step):
        fake_gpu.names.clear()
        fake_gpu.refused = refused, count
        try:
            LLMEngine(EngineConfig(model=str(model), **SIZES)).close()
        except (CudaError, OutOfMemoryError):
            opened = False
        else:
            opened = True
        for makes, frees in FREED_BY.items():
            made = fake_gpu.names.count(makes) - (makes == refused and not opened)
            assert made == fake_gpu.names.count(frees), (count, makes)
        assert (fake_gpu.used, fake_gpu.blocks) == (0, {})
        if opened:
            break
    assert 0 < count < 100


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_all_and_waking_brings_the_weights_back(engine, fake_gpu, level):
    before, bits = held(fake_gpu), weights(engine)
    assert len(set(bits)) > 100
    want = tokens_of(run(engine, PROMPTS))
    executor = engine.backend.executor
    for _ in range(2):
        engine.sleep(level)
        assert engine.is_sleeping()
        assert held(fake_gpu) == (0, 1 if level == 1 else 0)
        assert engine.backend.device.mem_info()[0] == fake_gpu.limit, "trimmed"
        engine.wake_up()
        assert held(fake_gpu) == before
        assert weights(engine) == bits
        assert engine.backend.executor is not executor
        assert tokens_of(run(engine, PROMPTS)) == want


@pytest.mark.parametrize("level", [1, 2])
def test_waking_that_runs_out_of_memory_anywhere_may_be_tried_again(engine, fake_gpu, level):
    bits = weights(engine)
    engine.sleep(level)
    asleep = held(fake_gpu)
    failures = 0
    while engine.is_sleeping():
        fake_gpu.fail_at, fake_gpu.limit = failures, 256 << 20
        try:
            engine.wake_up()
        except RuntimeError as error:
            assert "OUT_OF_MEMORY" in str(error) or "out of device memory" in str(error)
            assert held(fake_gpu) == asleep and fake_gpu.reserved == 0
            with pytest.raises(RuntimeError, match=r"call wake_up\(\) first"):
                run(engine, PROMPTS)
            failures += 1
    fake_gpu.fail_at = None
    assert failures > 10
    assert weights(engine) == bits
    run(engine, PROMPTS)


def test_waking_without_the_files_may_be_tried_again(engine, fake_gpu, model):
    want = weights(engine)
    engine.sleep(2)
    model.rename(model.parent / "away")
    with pytest.raises(InputError, match=str(model)):
        engine.wake_up()
    assert engine.is_sleeping() and held(fake_gpu) == (0, 0)
    (model.parent / "away").rename(model)
    engine.wake_up()
    assert weights(engine) == want
    run(engine, PROMPTS)


def test_weights_that_cannot_be_pinned_leave_it_awake(engine, fake_gpu):
    before = held(fake_gpu)
    fake_gpu.fail_at = 0
    with pytest.raises(OutOfMemoryError, match=r"no room in pinned host memory.*level=2"):
        engine.sleep(1)
    assert not engine.is_sleeping() and held(fake_gpu) == before
    fake_gpu.fail_at = None
    run(engine, PROMPTS)
    engine.sleep(2)


def test_asleep_it_can_be_closed(engine):
    engine.sleep(1)


def test_steps_in_flight_after_the_last_end_are_no_hindrance(engine):
    """A request that ends by a token leaves a step behind, launched before that was known."""
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[0])
    run(engine, PROMPTS, params)
    assert engine._running, "nothing is in flight: the test shows nothing"
    engine.sleep()
    engine.wake_up()
    run(engine, PROMPTS)


@pytest.mark.parametrize("side", ["device", "host"])
def test_a_step_that_finds_no_memory_ends_with_an_error_and_the_engine_goes_on(
    engine, fake_gpu, side
):
    """The arena of the scores, or the pinned memory of their fetch, is refused."""
    if side == "host":
        engine.backend.executor._outputs.slot_bytes = 0  # every fetch gets a slot of its own
    before = held(fake_gpu)
    run(engine, PROMPTS, SCORED)
    assert held(fake_gpu) == before
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, SCORED)
    fake_gpu.fail_at = 0 if side == "device" else 2  # after those of the tokens and of the arena
    with pytest.raises(RuntimeError, match=r"out of device memory|cuMemHostAlloc.*OUT_OF_MEMORY"):
        engine.step()
    aborted = engine.abort_all()
    assert [output.outputs[0].finish_reason for output in aborted] == ["abort"] * 3
    assert held(fake_gpu) == before
    fake_gpu.fail_at = None
    assert tokens_of(run(engine, PROMPTS, SCORED)) == [[0] * 6] * 3


def test_sequences_are_swapped_beside_the_steps(fake_gpu, model):
    """No allocation but of the slabs, and a phase of their own in a recording."""
    options = {**SIZES, "max_model_len": 64, "num_gpu_blocks_override": 12}
    engine = LLMEngine(EngineConfig(model=str(model), preemption_mode="swap", **options))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for num_pinned in (1, 0):
        with recording() as recorder:
            assert tokens_of(run(engine, PROMPTS, params)) == [[0] * 40] * 3
        copies = [call for call in recorder.calls if call.name == "cuMemcpyBatchAsync"]
        assert len(copies) >= 4 and {call.phase for call in copies} == {"swap"}
        pinned = [call for call in recorder.calls if call.name == "cuMemHostAlloc"]
        assert len(pinned) == num_pinned
        engine.sleep(2)
        assert fake_gpu.used == 0
        engine.wake_up()
    assert engine.backend.swapper.stats.bytes_in > 0
    assert engine.scheduler.num_preemptions["swap"] >= 2
    engine.close()
    assert (fake_gpu.used, fake_gpu.pinned, fake_gpu.blocks) == (0, 0, {})


def test_swap_space_is_pinned_at_start_or_not_at_all(fake_gpu, model):
    for options, num_slabs in (({}, 0), ({"pin_swap_space": True}, 4)):
        with LLM(str(model), **SIZES, swap_space=0.25, **options) as llm:
            assert len(llm.engine.backend.swapper.slabs) == num_slabs
        assert fake_gpu.pinned == 0
    for options in ({"swap_space": 0}, {"preemption_mode": "recompute"}):
        with LLM(str(model), **SIZES, **options) as llm:
            assert llm.engine.backend.swapper is None


def test_kernels_are_requested_before_the_first_step(fake_gpu, model, monkeypatch):
    requested, used = set(), set()
    monkeypatch.setattr(FakeLoader, "request", lambda self, specs: requested.update(specs))
    kernel = FakeLoader.kernel
    monkeypatch.setattr(
        FakeLoader, "kernel", lambda self, launch: used.add(launch.spec) or kernel(self, launch)
    )
    with LLM(str(model), **SIZES) as llm:
        at_start = set(requested)
        run(llm.engine, PROMPTS, SCORED)
        run(llm.engine, PROMPTS, SamplingParams(max_tokens=3, top_p=0.5, presence_penalty=1))
    assert len(used) > 10 and not used - at_start


def test_kernels_are_waited_for_if_asked_to(fake_gpu, model, monkeypatch):
    loaded = []
    monkeypatch.setattr(FakeLoader, "load_requested", lambda self: loaded.append(1), raising=False)
    for wait in (False, True):
        with LLM(str(model), **SIZES, wait_for_kernels=wait):
            assert len(loaded) == wait


def test_what_is_planned_is_reserved_before_the_weights_come(fake_gpu, model, monkeypatch):
    reserved = []
    read = cuda_backend.CudaBackend._read_weights

    def seen(self, base):
        reserved.append(fake_gpu.reserved)
        read(self, base)

    monkeypatch.setattr(cuda_backend.CudaBackend, "_read_weights", seen)
    with LLM(str(model), **SIZES) as llm:
        assert reserved == [fake_gpu.reserved]
        memory = llm.engine.backend.memory
        assert memory.fixed + memory.kv <= fake_gpu.reserved <= memory.threshold


def test_a_kernel_that_cannot_be_loaded_leaves_nothing(fake_gpu, model, monkeypatch):
    def refuse(self, specs):
        raise InputError(f"{len(list(specs))} kernels")

    monkeypatch.setattr(FakeLoader, "request", refuse)
    with pytest.raises(InputError, match=r"^\d+ kernels$"):
        LLM(str(model), **SIZES)
    assert (fake_gpu.used, fake_gpu.pinned, fake_gpu.blocks) == (0, 0, {})


def test_a_swap_space_that_cannot_be_pinned_at_start_is_an_error(fake_gpu, model):
    fake_gpu.names.clear()
    LLM(str(model), **SIZES, swap_space=0.25).close()
    allocations = ("cuMemHostAlloc", "cuMemAllocFromPoolAsync")
    fake_gpu.fail_at = sum(map(fake_gpu.names.count, allocations)) + 2  # two slabs more
    with pytest.raises(InputError, match=r"swap_space=0.25: 128.00 MiB could be pinned, not 256"):
        LLM(str(model), **SIZES, swap_space=0.25, pin_swap_space=True)
    assert (fake_gpu.used, fake_gpu.pinned, fake_gpu.blocks) == (0, 0, {})


def calls_by_step(engine, num_steps):
    """Names of the driver calls of each of so many decode steps that are like those before."""
    params = SamplingParams(temperature=0, max_tokens=num_steps + 16, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for _ in range(8):
        engine.step()
    steps = []
    for _ in range(num_steps):
        with recording() as recorder:
            engine.step()
        steps.append([(call.name, call.phase) for call in recorder.calls])
    while engine.has_unfinished_requests():
        engine.step()
    return steps


def check_decode_path(steps):
    """No allocation, at most one wait; a graph is launched, not captured."""
    for calls in steps:
        names = [name for name, _ in calls]
        allocations = [n for n in names if "Alloc" in n or "Free" in n or "HostRegister" in n]
        assert not allocations
        waits = [n for n in names if n.endswith("Synchronize")]
        assert len(waits) <= 1 and set(waits) <= {"cuEventSynchronize"}
        assert names.count("cuGraphLaunch") == 1 and not any("Capture" in n for n in names)


def test_decode_steps_allocate_nothing_and_wait_once(engine):
    check_decode_path(calls_by_step(engine, 40))


def test_reuse_attributes_reach_the_pool(fake_gpu, model):
    options = {
        "pool_reuse_follow_event_dependencies": "REUSE_FOLLOW_EVENT_DEPENDENCIES",
        "pool_reuse_allow_opportunistic": "REUSE_ALLOW_OPPORTUNISTIC",
        "pool_reuse_allow_internal_dependencies": "REUSE_ALLOW_INTERNAL_DEPENDENCIES",
    }
    for off in (None, *options):
        with LLM(str(model), **SIZES, **({off: False} if off else {})):
            have = fake_gpu.pool_attributes
            assert {o: bool(have[a]) for o, a in options.items()} == {o: o != off for o in options}


def test_what_a_step_needs_is_reserved_at_the_start(engine, fake_gpu):
    reserved = fake_gpu.reserved
    run(engine, PROMPTS, SCORED)
    assert fake_gpu.reserved == reserved < engine.backend.memory.threshold


# --- on a GPU


@pytest.fixture
def open_gpu_engine(golden):
    """Opens engines on the GPU by their options, and closes them."""
    engines = []

    def open_one(**options):
        options = {"model": str(golden / "llama_bias"), **SIZES, **options}
        engines.append(LLMEngine(EngineConfig(**options)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.mark.gpu
def test_decode_steps_on_a_gpu_allocate_nothing_and_wait_once(open_gpu_engine):
    engine = open_gpu_engine(max_model_len=2048, wait_for_kernels=True)
    check_decode_path(calls_by_step(engine, 200))


@pytest.mark.gpu
def test_reserved_memory_is_constant_over_a_thousand_mixed_steps(open_gpu_engine):
    """Prompts in chunks with decodes, scores of prompts, row lists, samples, preemptions."""
    engine = open_gpu_engine(num_gpu_blocks_override=90, max_num_batched_tokens=64)
    pool, rng = engine.backend.pool, random.Random(0)
    kinds = [
        {"temperature": 0},
        {"prompt_logprobs": 5},
        {"repetition_penalty": 1.2, "logit_bias": {9: 1.0}, "logprobs": 3},
        {"n": 2, "top_p": 0.9, "seed": 1},
    ]
    reserved, num_mixed, num_requests = {pool.stats().reserved}, 0, 0
    schedule = engine.scheduler.schedule

    def counted():
        nonlocal num_mixed
        step = schedule()
        num_mixed += bool(step and step.num_decodes and step.prefill_rows)
        return step

    engine.scheduler.schedule = counted
    with recording() as recorder:
        for _ in range(1000):
            if len(engine.scheduler.waiting) < 3:
                prompt = [rng.randrange(3, 512) for _ in range(rng.randint(1, 200))]
                params = SamplingParams(
                    **rng.choice(kinds), max_tokens=rng.randint(1, 30), ignore_eos=True
                )
                engine.add_request(str(num_requests), {"prompt_token_ids": prompt}, params)
                num_requests += 1
            engine.step()
            reserved.add(pool.stats().reserved)
    engine.abort_all()
    assert num_mixed > 100
    assert reserved == {pool.stats().reserved_high} and reserved.pop() <= pool.threshold
    calls = {}
    for call in recorder.calls:
        calls.setdefault(call.name, []).append(call.args)
    assert "cuCtxSynchronize" not in calls and "cuStreamSynchronize" not in calls
    assert not {"cuMemAlloc", "cuMemFree", "cuMemPoolTrimTo"} & calls.keys()
    allocations, frees = calls["cuMemAllocFromPoolAsync"], calls["cuMemFreeAsync"]
    assert len(allocations) == len(frees) > 20
    streams = {args["hStream"] for args in (*allocations, *frees)}
    launched = {args["hStream"] for args in calls["cuGraphLaunch"]}
    assert streams == launched and len(streams) == 1, "they come and go in the stream's order"


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_is_seen_in_the_free_memory_of_the_device(open_gpu_engine, device, level):
    engine = open_gpu_engine(model="llama-3.2-1b", load_format="dummy", max_num_seqs=8)
    prompts = [[5 + i] * 40 for i in range(3)]
    want = tokens_of(run(engine, prompts))
    reserved, given_back = engine.backend.pool.stats().reserved, []
    assert reserved > engine.backend.memory.weights > 2 << 30
    for _ in range(2):
        free = device.mem_info()[0]
        engine.sleep(level)
        assert engine.backend.pool.stats().reserved == 0
        given_back.append(device.mem_info()[0] - free)
        engine.wake_up()
        assert engine.backend.pool.stats().reserved == reserved
        assert tokens_of(run(engine, prompts)) == want
    # Programs that are no tests wait for nobody, and may take some memory just then.
    assert max(given_back) >= 0.98 * reserved


@pytest.mark.gpu
def test_a_step_over_the_budget_ends_with_an_error_and_the_engine_goes_on(
    open_gpu_engine, monkeypatch
):
    engine = open_gpu_engine()
    want = tokens_of(run(engine, PROMPTS, SCORED))
    used = engine.backend.pool.stats().used
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, SCORED)
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend.pool, "budget", used)
        with pytest.raises(OutOfMemoryError, match="gpu_memory_utilization"):
            engine.step()
    engine.abort_all()
    assert engine.backend.pool.stats().used == used
    assert tokens_of(run(engine, PROMPTS, SCORED)) == want
