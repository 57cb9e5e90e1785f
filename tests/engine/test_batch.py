"""A scheduled step as arrays: compared with what each row should find on the device."""

import random

import driving
import numpy as np
import pytest

from tinyvllm.engine.batch import (
    build_batch,
    request_seed,
    size_class,
    step_limits,
    take_excess_edits,
)
from tinyvllm.engine.request import Request
from tinyvllm.engine.step import ScheduledRow, ScheduledStep
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.ops.program import concrete
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params, new_row_params
from tinyvllm.sampling_params import SamplingParams

LIMITS = step_limits(4, 16, 64, 4)


def make_scheduler(num_blocks=40, block_size=4, **sizes):
    sizes = {"seqs": 4, "budget": 16, "max_len": 64, **sizes}
    return driving.make_scheduler(BlockManager(num_blocks, block_size), **sizes)


def make_request(name, prompt, **options):
    request = Request(name, list(prompt), SamplingParams(**options), ())
    request.validate(max_model_len=64, vocab_size=50)
    return request


def test_prompts_then_a_mixed_step():
    scheduler = make_scheduler()
    first = make_request("a", range(10, 15), temperature=0.5, seed=(7 << 32) + (1 << 31))
    second = make_request("b", range(20, 40), temperature=0)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.schedule()
    batch = build_batch(step, engine_seed=3, limits=LIMITS)
    inputs = batch.inputs
    assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in inputs.values())
    assert inputs["prompt_ids"].tolist() == [*range(10, 15), *range(20, 31)]
    assert inputs["query_start"].tolist() == [0, 5, 16]
    assert inputs["batch_slots"].tolist() == [first.slot, second.slot]
    assert inputs["sample_rows"].tolist() == [0], "the second prompt is not finished"
    assert inputs["edit_counts"].tolist() == [2, 5]
    edits = as_row_params(inputs["row_edits"])
    assert edits["slot"].tolist() == [first.slot, second.slot]
    assert edits["temperature"].tolist() == [0.5, 0]
    assert edits["seed"][0].tolist() == [1 << 31, 7]
    assert edits["prompt_len"].tolist() == [5, 20]
    tables = {(slot, index): block for _, slot, index, block in inputs["block_edits"].tolist()}
    assert tables == {(r.slot, i): b for r in (first, second) for i, b in enumerate(r.block_ids[0])}
    assert batch.dims == {"T": 16, "R": 2, "R1": 3, "S": 1, "D": 0, "Q": 16, "C": 256, "CP": 0}

    scheduler.update(step, [42])
    step = scheduler.schedule()
    batch = build_batch(step, engine_seed=3, limits=LIMITS)
    inputs = batch.inputs
    assert inputs["prompt_ids"].tolist() == [-1, *range(31, 40)], "the device knows token 42"
    assert inputs["query_start"].tolist() == [0, 1, 10]
    assert inputs["sample_rows"].tolist() == [0, 1]
    assert inputs["row_edits"].shape == (0, ROW_WORDS)
    assert batch.dims == {"T": 10, "R": 2, "R1": 3, "S": 2, "D": 1, "Q": 16, "C": 256, "CP": 0}

    scheduler.update(step, [1, 2])
    dims = build_batch(scheduler.schedule(), engine_seed=3, limits=LIMITS).dims
    assert (dims["T"], dims["D"], dims["Q"]) == (2, 2, 0), "no prefill row, no query length"


def test_row_edits_carry_the_parameters():
    scheduler = make_scheduler()
    options = {
        "top_k": 40,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2,
    }
    request = make_request("a", range(5), seed=3, **options)
    request.row_lists = {
        "row_bias_tokens": np.zeros(6, np.int32),
        "row_bad_words": np.zeros((2, 8), np.int32),
    }
    scheduler.add(request)
    scheduler.add(make_request("b", range(5), top_k=-1, seed=4))
    step = scheduler.schedule()
    joins, off = as_row_params(build_batch(step, 0, LIMITS).inputs["row_edits"])
    names = ("repetition", "presence", "frequency")
    assert [joins[n] for n in ("top_k", "top_p", "min_p", *names)] == list(options.values())
    assert [joins[n] for n in ("num_bias", "num_bad_words", "counted")] == [6, 2, 1]
    expected = new_row_params(1)
    for name in ("slot", "temperature", "seed", "prompt_len"):
        expected[name] = off[name]
    assert off == expected[0], "what was not asked for is off"


def test_tokens_are_copied_from_the_prompt_and_beyond_it():
    request = make_request("a", [10, 11, 12])
    request.output_token_ids = [20, 21]
    for start in range(5):
        for stop in range(start, 6):
            out = np.full(stop - start, -1, np.int32)[: 5 - start]
            request.copy_tokens(start, out)
            assert out.tolist() == [10, 11, 12, 20, 21][start:stop]


@pytest.mark.parametrize("prompt", [[], [7, 8]])
def test_a_row_that_returns_is_a_decode_row_with_its_token(prompt):
    """In a step of decode rows alone, and in a mixed one."""
    back, other = make_request("back", [1, 2, 3], seed=5), make_request("other", [4], seed=6)
    back.output_token_ids = [11, 12]
    step = ScheduledStep(num_decodes=2, num_tokens=2 + len(prompt), longest_context=5)
    step.rows = [ScheduledRow(back, 2, 4, 1, True), ScheduledRow(other, 0, 1, 1, True)]
    step.joins = [step.rows[0]]
    step.new_blocks = [(0, 2, 0, 9), (0, 2, 1, 3)]
    if prompt:
        step.rows.append(ScheduledRow(make_request("new", prompt), 3, 0, len(prompt), True))
        step.joins.append(step.rows[-1])
    inputs = build_batch(step, 0, LIMITS).inputs
    assert inputs["edit_counts"].tolist() == [len(step.joins), 2]
    edits = as_row_params(inputs["row_edits"])
    assert edits["slot"].tolist() == [2, 3][: len(step.joins)]
    assert edits["position"].tolist() == [4, 0][: len(step.joins)]
    assert edits["token"][0] == 12, "the one that it sampled last"
    assert edits["seed"][0].tolist() == [5, 0]
    assert inputs["prompt_ids"].tolist() == [-1, -1, *prompt]
    assert inputs["block_edits"].tolist() == [list(entry) for entry in step.new_blocks]


def test_a_step_without_sampled_rows_has_empty_arrays():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(30)))
    batch = build_batch(scheduler.schedule(), 0, LIMITS)
    assert batch.dims["S"] == 0
    assert batch.inputs["sample_rows"].shape == (0,)
    assert batch.inputs["row_edits"].shape == (1, ROW_WORDS)


@pytest.mark.parametrize("seed", range(5))
def test_every_step_stays_within_the_limits(seed):
    """Random traffic through a small cache: preemptions, chunks, all within the planned sizes."""
    rng = random.Random(seed)
    block_size, max_len, budget, seqs = 4, 48, 12, 4
    scheduler = make_scheduler(16, block_size, seqs=seqs, budget=budget, max_len=max_len)
    limits = step_limits(seqs, budget, max_len, block_size)
    shapes = {
        "edit_counts": (2,),
        "row_edits": ("E", ROW_WORDS),
        "block_edits": ("B", 4),
        "block_copies": ("CP", 2),
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
        for edits in take_excess_edits(step, limits["B"]):
            assert len(edits["block_edits"]) == limits["B"] == edits["edit_counts"][1]
        batch = build_batch(step, 0, limits)
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
