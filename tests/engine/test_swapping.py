"""Preempted sequences, swapped or computed again, yield what they would have undisturbed."""

import functools
import hashlib
import itertools
import logging

import numpy as np
import pytest
from driving import run as run_queued
from driving import tokens_of

from tinyvllm.driver.calls import CudaError
from tinyvllm.engine.request import RequestStatus
from tinyvllm.sampling_params import SamplingParams

VOCAB = 512
SIZES = {
    "block_size": 8,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
    "max_model_len": 64,
    "preemption_threshold": 0.9,
}


@pytest.fixture(scope="module")
def undisturbed(reference):
    """Prompts, parameters and undisturbed outputs; computed once for all tests."""

    @functools.cache
    def get(count, kind):
        prompts, params = random_prompts(count, seed=count), sampling(count, kind)
        return prompts, params, run(reference, prompts, params)

    return get


@pytest.fixture
def check(comparison):
    """Asserts that outputs are the wanted ones, but for what rounding explains."""

    def check_all(engine, prompts, params, have, want):
        for prompt, p, outputs, others in zip(prompts, params, have, want, strict=True):
            for a, b in zip(outputs.outputs, others.outputs, strict=True):
                if a.token_ids == b.token_ids:
                    continue
                # With filters, what rounding does on a GPU cannot be told from other mistakes.
                assert comparison.comparable(p) or engine.backend.asynchronous
                if comparison.comparable(p):
                    comparison.check(engine, prompt, p, a.token_ids, b.token_ids, a.index)

    return check_all


def run(engine, prompts, params):
    outputs = run_queued(engine, prompts, params)
    assert engine.scheduler.swaps.num_used == 0
    return outputs


def random_prompts(count, seed, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, int(n)).tolist() for n in rng.integers(8, longest, count)]


def sampling(count, kind, **options):
    base = {"max_tokens": 32, "ignore_eos": True, "seed": 0, **options}
    params = {
        "greedy": {"temperature": 0},
        "sampled": {"temperature": 1.0},
        "biased": {"temperature": 0.8, "min_tokens": 20, "logit_bias": {7: 3.0}, "top_k": 50},
        "penalised": {"temperature": 1.0, "presence_penalty": 0.6},
        "scored": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        "samples": {"temperature": 1.0, "n": 3},
    }[kind]
    return [SamplingParams(**{**base, **params, "seed": 100 + i}) for i in range(count)]


def pressed(count):
    """Blocks for two fifths of so many sequences (7 blocks each at their ends)."""
    return max(9, count * 7 * 2 // 5)


@pytest.mark.parametrize(
    ("count", "kind", "ahead", "caching"),
    [
        (2, "greedy", False, True),
        (2, "sampled", True, False),
        (8, "greedy", True, True),
        (8, "sampled", False, False),
        (8, "biased", True, True),
        (8, "penalised", True, True),
        (8, "scored", False, True),
        (4, "samples", True, True),
        (4, "samples", False, False),
        (64, "sampled", True, True),
    ],
)
def test_undisturbed_swapped_and_computed_again(
    open_engine, undisturbed, check, count, kind, ahead, caching
):
    prompts, params, want = undisturbed(count, kind)
    sequences = count * params[0].n
    options = {"async_scheduling": ahead, "enable_prefix_caching": caching}
    for mode in ("swap", "recompute"):
        engine = open_engine(
            **options, num_gpu_blocks_override=pressed(sequences), preemption_mode=mode
        )
        have = run(engine, prompts, params)
        check(engine, prompts, params, have, want)
        number = engine.scheduler.num_preemptions
        if mode == "recompute" or kind == "penalised":
            assert number["recompute"] > 0 and number["swap"] == 0
            assert engine.scheduler.swaps.swapper is None or kind == "penalised"
        else:
            assert number["swap"] > sequences / 10
            stats = engine.scheduler.swaps.swapper.stats
            assert stats.bytes_out >= stats.bytes_in > 0
        for a, b in zip(have, want, strict=True):
            assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
            if kind == "scored":
                assert len(a.prompt_logprobs) == len(b.prompt_logprobs)
                assert len(a.outputs[0].logprobs) == 32


def test_full_blocks_are_copied_while_the_sequence_runs_and_computed_once(open_engine):
    """Of a swapped sequence only the rest is copied at its preemption, and no token again."""
    prompts, params = random_prompts(8, seed=1), sampling(8, "greedy")
    # Launched ahead, some are preempted with their last token in flight: nothing is copied then.
    engine = open_engine(
        num_gpu_blocks_override=30, preemption_threshold=0.7, async_scheduling=False
    )
    swaps, schedule = engine.scheduler.swaps, engine.scheduler.schedule
    copied, tokens = {True: 0, False: 0}, []
    copy_out = swaps.copy_out

    def watched(request, num_blocks):
        have = sum(map(len, request.host_block_ids))
        full = num_blocks * 8 <= request.num_computed_tokens
        assert copy_out(request, num_blocks)
        copied[full and request.decoding] += sum(map(len, request.host_block_ids)) - have
        return True

    def counted():
        step = schedule()
        tokens.append(step.num_tokens if step else 0)
        return step

    swaps.copy_out, engine.scheduler.schedule = watched, counted
    run(engine, prompts, params)
    assert engine.scheduler.num_preemptions["swap"] > 2
    assert engine.scheduler.num_preemptions["recompute"] == 0
    assert copied[True] > copied[False]
    assert sum(tokens) == sum(len(p) + 31 for p in prompts)


def test_choice_and_reason_are_logged(open_engine, caplog):
    engine = open_engine(num_gpu_blocks_override=20, preemption_mode="swap")
    with caplog.at_level(logging.INFO, "tinyvllm"):
        run(engine, random_prompts(6, seed=2), sampling(6, "greedy"))
    lines = [r.getMessage() for r in caplog.records if "is preempted" in r.getMessage()]
    assert len(lines) == sum(engine.scheduler.num_preemptions.values()) > 0
    assert any(line.endswith("is preempted: swap, preemption_mode is swap") for line in lines)


def test_costs_are_measured_and_decide(open_engine, caplog):
    engine = open_engine(num_gpu_blocks_override=20)
    prompts, params = random_prompts(6, seed=2), sampling(6, "greedy")
    run(engine, prompts, params)
    assert engine.scheduler.prefill_rate.rate > 0
    stats = engine.scheduler.swaps.swapper.stats
    with caplog.at_level(logging.INFO, "tinyvllm"):
        stats.plain_out_rate = stats.plain_in_rate = 1.0  # a byte a second
        engine.scheduler.num_preemptions["swap"] = 0
        run(engine, prompts, params)
    assert engine.scheduler.num_preemptions["swap"] == 0
    assert any("tokens again" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("host_blocks", [1, 5, 12])
def test_without_room_in_the_swap_space_sequences_are_computed_again(
    open_engine, reference, undisturbed, check, caplog, host_blocks
):
    prompts, params, want = undisturbed(8, "sampled")
    block_bytes = reference.backend.memory.block_bytes
    engine = open_engine(
        num_gpu_blocks_override=pressed(8),
        preemption_mode="swap",
        swap_space=host_blocks * block_bytes / (1 << 30),
    )
    assert engine.scheduler.swaps.num_free == host_blocks
    with caplog.at_level(logging.INFO, "tinyvllm"):
        check(engine, prompts, params, run(engine, prompts, params), want)
    assert "swap space full" in caplog.text
    assert engine.scheduler.num_preemptions["recompute"] > 0
    if host_blocks != 5:
        assert (engine.scheduler.num_preemptions["swap"] > 0) == (host_blocks > 1)


def digests(engine, blocks):
    """A checksum of each block's bytes on the device."""
    executor = engine.backend.executor
    if engine.backend.asynchronous:
        cache = executor.read_state("kv_cache")
    else:
        cache = engine.backend.swapper._kv_cache
    return [hashlib.sha256(cache[block].tobytes()).digest() for block in blocks]


def test_blocks_come_back_bit_for_bit(open_engine):
    """Checksums when a copy out begins, against those when the copy back has been made."""
    engine = open_engine(num_gpu_blocks_override=pressed(8), preemption_mode="swap")
    swaps, swapper = engine.scheduler.swaps, engine.backend.swapper
    on_host, compared = {}, 0
    swap_out, swap_in, end = swapper.swap_out, swapper.swap_in, swaps._end
    arriving = {}

    def out(pairs):
        device, host = zip(*pairs, strict=True)
        on_host.update(zip(host, digests(engine, device), strict=True))
        return swap_out(pairs)

    def back(pairs):
        ticket = swap_in(pairs)
        arriving[ticket] = [(device, on_host[host]) for device, host in pairs]
        return ticket

    def ended(copy):
        nonlocal compared
        expected = arriving.pop(copy.ticket, [])
        have = digests(engine, [device for device, _ in expected])
        assert have == [digest for _, digest in expected]
        compared += len(have)
        end(copy)

    swapper.swap_out, swapper.swap_in, swaps._end = out, back, ended
    run(engine, random_prompts(8, seed=4), sampling(8, "sampled"))
    assert compared > 10


class Broken:
    """A ticket of copies that turn out to have failed."""

    def __init__(self, ticket):
        self.ticket = ticket

    def done(self):
        if self.ticket.done():
            raise broken()
        return False

    def wait(self):
        self.ticket.wait()


def broken():
    return CudaError("cuMemcpyBatchAsync", 719, "CUDA_ERROR_LAUNCH_FAILED", "on purpose", ())


@pytest.mark.parametrize("which", ["swap_out", "swap_in"])
@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_copy_that_fails_ends_the_request_that_it_was_for(
    open_engine, undisturbed, check, which, when, ahead
):
    prompts, params, want = undisturbed(8, "sampled")
    engine = open_engine(
        num_gpu_blocks_override=pressed(8), preemption_mode="swap", async_scheduling=ahead
    )
    swapper, number = engine.backend.swapper, itertools.count()
    copy = getattr(swapper, which)

    def sometimes(pairs):
        if next(number) % 4 != 1:
            return copy(pairs)
        if when == "at once":
            raise broken()
        return Broken(copy(pairs))

    setattr(swapper, which, sometimes)
    have = run(engine, prompts, params)
    reasons = [output.outputs[0].finish_reason for output in have]
    assert set(reasons) == {"length", "error"} and reasons.count("length") > 3
    for output, full in zip(have, want, strict=True):
        completion = output.outputs[0]
        assert output.finished
        if completion.finish_reason == "error":
            assert "on purpose" in completion.stop_reason
            tokens = full.outputs[0].token_ids
            assert completion.token_ids == tokens[: len(completion.token_ids)]
    kept = [i for i, reason in enumerate(reasons) if reason == "length"]
    check(
        engine,
        [prompts[i] for i in kept],
        [params[i] for i in kept],
        [have[i] for i in kept],
        [want[i] for i in kept],
    )


def states(engine):
    """Requests by what swapping is doing with them."""
    found = {}
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        if request.returning:
            found["returning"] = request
        elif request.status is RequestStatus.SWAPPED:
            found["leaving" if request.num_copies else "swapped"] = request
        elif request.num_copies:
            found["copied while it runs"] = request
    return found


@pytest.mark.parametrize("state", ["copied while it runs", "leaving", "swapped", "returning"])
@pytest.mark.parametrize("end", ["abort", "abort all"])
def test_an_end_in_every_state_frees_all(open_engine, undisturbed, check, state, end):
    prompts, params, want = undisturbed(8, "sampled")
    engine = open_engine(num_gpu_blocks_override=pressed(8), preemption_mode="swap")
    if not engine.backend.asynchronous:
        engine.backend.swapper.polls = 4  # so that every state lasts
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
    outputs, ended = {}, set()
    while engine.has_unfinished_requests():
        outputs |= {int(o.request_id): o for o in engine.step()}
        engine.scheduler.check_integrity()
        victim = states(engine).get(state)
        if victim is not None and len(ended) < 2:
            if end == "abort all":
                assert len(engine.abort_all()) + len(outputs) == 8
                ended.update(range(8))
            else:
                assert engine.abort_request(victim.request_id).outputs[0].finish_reason == "abort"
            ended.add(int(victim.request_id))
            engine.scheduler.check_integrity()
    assert ended, f"no request was {state}"
    engine.scheduler.end_copies()
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0 and engine.scheduler.swaps.num_used == 0
    kept = [i for i in outputs if i not in ended]
    check(
        engine,
        [prompts[i] for i in kept],
        [params[i] for i in kept],
        [outputs[i] for i in kept],
        [want[i] for i in kept],
    )


def test_a_failed_step_leaves_copies_and_blocks_consistent(
    open_engine, undisturbed, check, monkeypatch
):
    prompts, params, want = undisturbed(8, "sampled")
    engine = open_engine(num_gpu_blocks_override=pressed(8), preemption_mode="swap")
    for countdown in (1, 3):
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
        while countdown or not engine.scheduler.swaps.busy:
            engine.step()
            countdown -= bool(countdown and engine.scheduler.swaps.busy)
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "launch", lambda step: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                while True:
                    engine.step()
        assert len(engine.abort_all()) > 0
        engine.scheduler.check_integrity()
        check(engine, prompts, params, run(engine, prompts, params), want)


def test_pinned_at_start(open_engine):
    engine = open_engine(pin_swap_space=True, swap_space=0.001)
    swapper = engine.backend.swapper
    assert len(swapper.slabs) == swapper.space.num_slabs == 1
    assert swapper.stats.plain_out_rate > 0 and swapper.stats.plain_in_rate > 0


def test_swap_space_outlives_sleep(open_engine, undisturbed, check):
    prompts, params, want = undisturbed(8, "sampled")
    engine = open_engine(num_gpu_blocks_override=pressed(8), preemption_mode="swap")
    check(engine, prompts, params, run(engine, prompts, params), want)
    engine.sleep(1)
    engine.wake_up()
    check(engine, prompts, params, run(engine, prompts, params), want)


def test_tokens_of_samples_differ(reference):
    """So that samples which got each other's blocks would be noticed."""
    outputs = run(reference, random_prompts(2, seed=4), sampling(2, "samples"))
    assert all(len({tuple(c.token_ids) for c in o.outputs}) == 3 for o in outputs)
    assert tokens_of(outputs)[0] != tokens_of(outputs)[1]


def test_copies_under_way_hold_no_blocks_once_nothing_runs(open_engine):
    """The last request ends or is aborted while its blocks are copied: nobody steps after that."""
    engine = open_engine(num_gpu_blocks_override=pressed(8), preemption_mode="swap")
    for end in ("statistics", "cache"):
        if not engine.backend.asynchronous:
            engine.backend.swapper.polls = 100
        for i, prompt in enumerate(random_prompts(8, seed=5)):
            (params,) = sampling(1, "greedy")
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while not engine.scheduler.swaps.busy:
            engine.step()
        engine.abort_all()
        if end == "statistics":
            stats = engine.stats()
            assert stats.kv_blocks_used == stats.swap.used_bytes == 0
        assert engine.reset_prefix_cache()
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


@pytest.mark.parametrize("broken_part", ["launch", "finish"])
def test_a_copy_and_a_step_that_fail_at_once_lose_no_request(open_engine, monkeypatch, broken_part):
    engine = open_engine(num_gpu_blocks_override=pressed(8), preemption_mode="swap")
    prompts, params = random_prompts(8, seed=6), sampling(8, "greedy")
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, p)

    def fail(pairs):
        monkeypatch.setattr(engine._runner, broken_part, lambda step: 1 / 0)
        raise broken()

    monkeypatch.setattr(engine.backend.swapper, "swap_out", fail)
    with pytest.raises(ZeroDivisionError):
        while True:
            assert engine.step() == []
    monkeypatch.undo()
    reasons = [output.outputs[0].finish_reason for output in engine.abort_all()]
    assert len(reasons) == 8 and "error" in reasons
    assert all(
        output.outputs[0].finish_reason == "length" for output in run(engine, prompts, params)
    )
