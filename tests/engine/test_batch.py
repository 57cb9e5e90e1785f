"""A scheduled step as arrays: compared with what each row should find on the device."""

import random

import numpy as np
import pytest

from tinyvllm.engine.batch import build_batch, request_seed, size_class, step_limits
from tinyvllm.engine.request import Request
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.ops.program import concrete
from tinyvllm.sampling_params import SamplingParams


def make_scheduler(num_blocks=40, block_size=4, seqs=4, budget=16, max_len=64):
    return Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        vocab_size=50,
    )


def make_request(name, prompt, **options):
    return Request(name, list(prompt), SamplingParams(**options), ())


def test_prompts_then_a_mixed_step():
    scheduler = make_scheduler()
    first = make_request("a", range(10, 15), temperature=0.5, seed=(7 << 32) + (1 << 31))
    second = make_request("b", range(20, 40), temperature=0)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.schedule()
    batch = build_batch(step, engine_seed=3)
    inputs = batch.inputs
    assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in inputs.values())
    assert inputs["prompt_ids"].tolist() == [*range(10, 15), *range(20, 31)]
    assert inputs["query_start"].tolist() == [0, 5, 16]
    assert inputs["batch_slots"].tolist() == [first.slot, second.slot]
    assert inputs["sample_rows"].tolist() == [0], "the second prompt is not finished"
    assert inputs["edit_counts"].tolist() == [2, 5]
    half = np.float32(0.5).view(np.int32)
    assert inputs["row_edits"].tolist()[0] == [first.slot, 0, 0, half, -(1 << 31), 7, 0, 0]
    assert inputs["row_edits"].tolist()[1][:4] == [second.slot, 0, 0, 0]
    tables = {(slot, index): block for _, slot, index, block in inputs["block_edits"].tolist()}
    assert tables == {(r.slot, i): b for r in (first, second) for i, b in enumerate(r.block_ids[0])}
    assert batch.dims == {"T": 16, "R": 2, "R1": 3, "S": 1, "D": 0, "Q": 16, "C": 256}

    scheduler.update(step, [42])
    step = scheduler.schedule()
    batch = build_batch(step, engine_seed=3)
    inputs = batch.inputs
    assert inputs["prompt_ids"].tolist() == [-1, *range(31, 40)], "the device knows token 42"
    assert inputs["query_start"].tolist() == [0, 1, 10]
    assert inputs["sample_rows"].tolist() == [0, 1]
    assert inputs["row_edits"].shape == (0, 8)
    assert batch.dims == {"T": 10, "R": 2, "R1": 3, "S": 2, "D": 1, "Q": 16, "C": 256}

    scheduler.update(step, [1, 2])
    dims = build_batch(scheduler.schedule(), engine_seed=3).dims
    assert (dims["T"], dims["D"], dims["Q"]) == (2, 2, 0), "no prefill row, no query length"


def test_a_step_without_sampled_rows_has_empty_arrays():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(30)))
    batch = build_batch(scheduler.schedule(), 0)
    assert batch.dims["S"] == 0
    assert batch.inputs["sample_rows"].shape == (0,)
    assert batch.inputs["row_edits"].shape == (1, 8)


@pytest.mark.parametrize("seed", range(5))
def test_every_step_stays_within_the_limits(seed):
    """Random traffic through a small cache: preemptions, chunks, all within the planned sizes."""
    rng = random.Random(seed)
    block_size, max_len, budget, seqs = 4, 48, 12, 4
    scheduler = make_scheduler(16, block_size, seqs, budget, max_len)
    limits = step_limits(seqs, budget, max_len, block_size)
    shapes = {
        "edit_counts": (2,),
        "row_edits": ("E", 8),
        "block_edits": ("B", 4),
        "batch_slots": ("R",),
        "query_start": ("R1",),
        "sample_rows": ("S",),
        "prompt_ids": ("T",),
    }
    for i in range(12):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        scheduler.add(make_request(str(i), prompt, max_tokens=rng.randint(1, 40)))
    preempted = 0
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        preempted += len(step.preempted)
        batch = build_batch(step, 0)
        for name, size in batch.dims.items():
            assert size <= limits[name], (name, size)
        for name, array in batch.inputs.items():
            room = concrete(shapes[name], limits)
            assert all(n <= limit for n, limit in zip(array.shape, room, strict=True)), name
        for name in ("batch_slots", "query_start", "sample_rows", "prompt_ids"):
            assert batch.inputs[name].shape == concrete(shapes[name], batch.dims), name
        starts = batch.inputs["query_start"]
        assert (np.diff(starts) >= 1).all() and starts[-1] == batch.dims["T"]
        assert (np.diff(starts)[: batch.dims["D"]] == 1).all()
        assert all(index < limits["MB"] for index in batch.inputs["block_edits"][:, 2])
        scheduler.update(step, [rng.randrange(50) for _ in step.sampling_rows])
    assert preempted, "the cache is small enough to preempt"


def test_size_class_is_the_next_power_of_two():
    assert [size_class(n) for n in (1, 2, 3, 4, 5, 1023, 1024, 1025)] == [
        1,
        2,
        4,
        4,
        8,
        1024,
        1024,
        2048,
    ]
    assert [size_class(n, 256) for n in (1, 256, 257)] == [256, 256, 512]


def test_seeds_are_the_requests_own_or_differ_by_arrival_and_engine():
    own = make_request("a", [1], seed=5)
    assert request_seed(own, 0) == request_seed(own, 1) == 5
    seeds = set()
    for arrival in range(100):
        request = make_request("b", [1])
        request.arrival = arrival
        seeds |= {request_seed(request, engine_seed) for engine_seed in (0, 1, (1 << 63) - 1)}
    assert len(seeds) == 300
    assert all(0 <= s < 1 << 64 for s in seeds)
    assert sum(s >> 63 for s in seeds) > 100, "all 64 bits are used"
