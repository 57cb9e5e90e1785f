"""What a snapshot counts, against counts made block by block and token by token."""

import random

import pytest
from driving import make_scheduler

from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.request import Request
from tinyvllm.engine.stats import SwapUsage, empty_slots
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.sampling_params import SamplingParams


def filled_slots(scheduler):
    """Tokens in each block in use, from the tables of the requests that hold it."""
    size = scheduler.blocks.block_size
    filled = {}
    for request in scheduler.running:
        for table in request.block_ids:
            for i, block in enumerate(table):
                tokens = min(size, max(0, request.num_computed_tokens - i * size))
                filled[block] = max(filled.get(block, 0), tokens)
    return filled


@pytest.mark.parametrize("seed", range(4))
def test_empty_slots_are_those_of_each_block_counted_once(seed):
    """Random requests with shared prefixes and several samples each, under preemption."""
    rng = random.Random(seed)
    groups = 1 + seed % 2
    blocks = BlockManager(20 * groups, 8, groups)
    scheduler = make_scheduler(blocks, seqs=6, budget=48, max_len=120)
    prefix, shared = [1] * 20, 0
    for i in range(16):
        prompt = prefix[: rng.randrange(21)] + [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(max_tokens=rng.randint(1, 60), n=1 + i % 2)
        parent = None
        for n in range(params.n):
            request = Request(f"{i}.{n}", prompt, params, parent=parent, index=n)
            parent = parent or request
            scheduler.add(request)
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        filled = filled_slots(scheduler)
        assert len(filled) == blocks.num_used
        empty = len(filled) * blocks.block_size - sum(filled.values())
        assert empty_slots(blocks, scheduler.running) == empty
        shared += any(blocks.ref_count(block) > 1 for block in filled)
        scheduler.update(step, [rng.randrange(50) for _ in step.sampling_rows])
    assert shared and scheduler.num_preemptions["recompute"], "the case is a hard one"


@pytest.fixture
def engine(golden):
    config = EngineConfig(
        model=str(golden / "llama_bias"), device="cpu", max_num_seqs=4, max_num_batched_tokens=64
    )
    opened = LLMEngine(config)
    yield opened
    opened.close()


def test_snapshots_of_an_engine(engine):
    """Before, in the middle of and after a few requests with an equal prefix."""
    stats = engine.stats()
    assert (stats.num_steps, stats.prompt_tokens, stats.generation_tokens) == (0, 0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total == engine.backend.memory.num_blocks
    assert stats.fragmentation == stats.kv_cache_usage == stats.prefix_cache_hit_rate == 0
    assert stats.swap.out_rate == stats.swap.in_rate == 0
    assert stats.swap.plain_out_rate == stats.swap.plain_in_rate == 0

    params = SamplingParams(max_tokens=8, ignore_eos=True, n=2, seed=1)
    prompt = list(range(3, 40))
    engine.add_request("first", {"prompt_token_ids": prompt}, params)
    for _ in range(3):
        engine.step()
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 0)
    # 37 tokens fill two blocks, which both sequences share; the third is each one's own.
    assert stats.kv_blocks_used == 4 and stats.kv_slots_used == 64
    generated = sum(len(r.output_token_ids) for r in engine.scheduler.running)
    assert stats.generation_tokens == generated == 5
    # The last token of each is not stored yet.
    assert stats.kv_slots_empty == 64 - (32 + 2 * 5 + generated - 2)
    assert stats.fragmentation == stats.kv_slots_empty / 64
    while engine.has_unfinished_requests():
        engine.step()

    engine.add_request("second", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    assert stats.num_requests_running == stats.kv_blocks_used == stats.kv_slots_empty == 0
    assert stats.kv_blocks_cached + stats.kv_blocks_free == stats.kv_blocks_total
    assert stats.kv_blocks_cached >= 2
    assert stats.prompt_tokens == 2 * len(prompt)
    # The second sample computed its last prompt token again; the second request found 32 tokens.
    assert stats.prefill_tokens == len(prompt) + 1 + len(prompt) - 32
    assert stats.prefix_cache_hits == 36 + 32
    assert stats.generation_tokens == 8 + 8 + 2
    assert stats.num_preemptions_recompute == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_snapshots_under_preemption(golden, mode):
    """Kinds, swap traffic and empty places at each step, against the blocks' own users."""
    config = EngineConfig(
        model=str(golden / "llama_bias"),
        device="cpu",
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=8,
        num_gpu_blocks_override=14,
        max_model_len=64,
        preemption_mode=mode,
        swap_space=0.01,
    )
    engine = LLMEngine(config)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for i in range(6):
        engine.add_request(str(i), {"prompt_token_ids": [i + 3] * (5 + 3 * i)}, params)
    blocks, swapped = engine.scheduler.blocks, 0
    while engine.has_unfinished_requests():
        engine.step()
        stats, filled = engine.stats(), filled_slots(engine.scheduler)
        assert len(filled) <= stats.kv_blocks_used, "copies under way hold some more"
        assert stats.kv_slots_empty == 8 * len(filled) - sum(filled.values())
        in_use = sum(blocks.ref_count(block) > 0 for block in range(blocks.num_blocks))
        assert stats.kv_blocks_used == in_use and stats.kv_slots_used == 8 * in_use
        held = stats.num_requests_running + stats.num_requests_waiting + stats.num_requests_swapped
        assert held == sum(engine.has_request(str(i)) for i in range(6))
        swapped = max(swapped, stats.num_requests_swapped)
        assert stats.swap.used_bytes <= stats.swap.pinned_bytes <= stats.swap.total_bytes
    assert stats.generation_tokens == 6 * 30
    assert stats.prompt_tokens == sum(5 + 3 * i for i in range(6))
    if mode == "swap":
        assert swapped and stats.num_preemptions_swap and not stats.num_preemptions_recompute
        assert stats.swap.in_bytes and stats.swap.in_bytes % engine.backend.memory.block_bytes == 0
        assert stats.swap.out_rate and stats.swap.in_rate and stats.swap.num_stalls == 1
        plain = engine.backend.swapper.stats
        assert stats.swap.plain_out_rate == plain.plain_out_rate > 0
        assert stats.swap.plain_in_rate == plain.plain_in_rate > 0
        assert stats.prefill_tokens == stats.prompt_tokens
    else:
        assert not swapped and not stats.num_preemptions_swap and stats.num_preemptions_recompute
        assert stats.swap == SwapUsage()
        assert stats.prefill_tokens > stats.prompt_tokens
    engine.close()


def test_the_simulated_pool_holds_the_plan(engine):
    memory, pool = engine.backend.memory, engine.stats().pool
    assert pool.used == pool.reserved == memory.threshold - memory.unused
    assert pool.used_high == pool.reserved_high == pool.used
    assert (pool.budget, pool.threshold) == (memory.budget, memory.threshold)
    engine.sleep()
    pool = engine.stats().pool
    assert pool.used == pool.reserved == 0 and pool.used_high > 0
    engine.wake_up()
    assert engine.stats().pool.used == pool.used_high


def test_a_closed_engine_has_no_stats(engine):
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.stats()


def test_swap_rates_are_of_the_time_that_copies_ran():
    before = SwapUsage(
        total_bytes=1000, pinned_bytes=200, used_bytes=200, out_bytes=100, in_bytes=10,
        out_seconds=1.0, in_seconds=0.25, plain_out_rate=9.0, plain_in_rate=8.0, num_stalls=1,
        stall_seconds=0.5,
    )  # fmt: skip
    after = SwapUsage(
        total_bytes=1000, pinned_bytes=600, used_bytes=500, out_bytes=400, in_bytes=70,
        out_seconds=2.5, in_seconds=0.75, plain_out_rate=9.0, plain_in_rate=8.0, num_stalls=3,
        stall_seconds=0.75,
    )  # fmt: skip
    between = after.since(before)
    assert between == SwapUsage(
        total_bytes=1000, pinned_bytes=600, used_bytes=500, out_bytes=300, in_bytes=60,
        out_seconds=1.5, in_seconds=0.5, plain_out_rate=9.0, plain_in_rate=8.0, num_stalls=2,
        stall_seconds=0.25,
    )  # fmt: skip
    assert (between.out_rate, between.in_rate, between.copy_seconds) == (200.0, 120.0, 2.0)
    assert after.since(after).out_rate == after.since(after).in_rate == 0


@pytest.mark.gpu
def test_the_pool_of_a_gpu(golden):
    """Its own attributes: all of the plan is used, and less than the threshold is reserved."""
    config = EngineConfig(
        model=str(golden / "llama_bias"),
        device="cuda",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
    )
    engine = LLMEngine(config)
    memory, pool = engine.backend.memory, engine.stats().pool
    assert memory.weights + memory.kv < pool.used <= pool.reserved <= pool.threshold
    assert pool.used <= pool.used_high and pool.reserved <= pool.reserved_high <= pool.budget
    engine.close()
