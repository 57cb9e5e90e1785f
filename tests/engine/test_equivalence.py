"""One request, one answer: however it is scheduled, launched, cached, preempted or accompanied.

Every test runs on the CPU and, marked `gpu`, on the GPU. Tokens must be the same wherever the best
value leads the second by more than rounding can change, and go on so after such a place.
"""

import dataclasses
import itertools
import signal
import threading
from collections import Counter

import numpy as np
import pytest
from driving import recorded, tokens_of
from driving import run as run_all

from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.batch import request_seed
from tinyvllm.engine.request import Request
from tinyvllm.sampling_params import MAX_SEED

VOCAB = 512
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def open_engine(open_engine):
    """Opens engines whose results are watched, and closes them."""
    engines = []

    def open_one(**options):
        engines.append(watched(open_engine(**options)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()
        assert engine.results["open"] == 0, "each result is read or discarded"


@pytest.fixture
def open_llm(golden, device_name):
    """Opens LLMs whose results are watched, and closes them."""
    opened = []

    def open_one(**options):
        options = {**SIZES, "device": device_name, **options}
        opened.append(LLM(str(golden / "llama_bias"), **options))
        watched(opened[-1].engine)
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()
        assert llm.engine.results["open"] == 0, "each result is read or discarded"


@pytest.fixture
def check(comparison):
    """Asserts that outputs are the wanted ones, but for what rounding explains."""

    def check_all(engine, prompts, params, have, want):
        each = params if isinstance(params, list) else [params] * len(prompts)
        for prompt, p, a, b in zip(prompts, each, have, want, strict=True):
            if a != b:
                comparison.check(engine, prompt, p, a, b)

    return check_all


def watched(engine):
    """The engine, whose `results` count the executor's that are neither read nor discarded, and
    its programs."""
    counts, executor = Counter(), engine.backend.executor
    plain = executor.run

    class Watched:
        def __init__(self, result):
            self.result, self.open = result, True
            counts["open"] += 1

        def close(self):
            counts["open"] -= self.open
            self.open = False

        def get(self):
            self.close()
            return self.result.get()

        def discard(self):
            self.close()
            self.result.discard()

    def run(program, *args, **options):
        result = plain(program, *args, **options)
        counts[program] += 1
        return Watched(result)

    executor.run, engine.results = run, counts
    return engine


def random_prompts(count, seed=0, shortest=1, longest=60):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(3, VOCAB, int(rng.integers(shortest, longest))).tolist() for _ in range(count)
    ]


def seeded(count, **options):
    """Sampling parameters with seeds of their own."""
    base = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, **options}
    return [SamplingParams(seed=1000 + i, **base) for i in range(count)]


def run(engine, prompts, params=GREEDY):
    return run_all(engine, prompts, params)


def alone(engine, prompts, params=GREEDY):
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [tokens_of(run(engine, [p], one))[0] for p, one in zip(prompts, each, strict=True)]


@pytest.mark.parametrize("sampler", ["greedy", "sampled", "filtered", "adjusted"])
def test_graphs_and_eager_launches_are_equal_bit_for_bit(open_engine, sampler):
    """Tokens and log-probabilities, over joins, leaves and row buckets."""
    prompts = random_prompts(11, seed=1)
    options = {
        "greedy": {"temperature": 0},
        "sampled": {},
        "filtered": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        "adjusted": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 3},
    }[sampler]
    params = [
        SamplingParams(
            **{"temperature": 0.9, "logprobs": 3, "seed": i, "ignore_eos": True, **options},
            max_tokens=4 + 2 * i,
        )
        for i in range(len(prompts))
    ]
    results = []
    for eager in (False, True):
        engine = open_engine(enforce_eager=eager)
        results.append([output.outputs[0] for output in run(engine, prompts, params)])
    for graph, eager in zip(*results, strict=True):
        assert graph.token_ids == eager.token_ids
        assert graph.logprobs == eager.logprobs, "the same floats"
        assert graph.cumulative_logprob == eager.cumulative_logprob


@pytest.mark.parametrize("params", [GREEDY, seeded(9)], ids=["greedy", "sampled"])
def test_launched_ahead_and_step_by_step(open_engine, check, params):
    prompts = random_prompts(9, seed=2)
    ahead = open_engine(async_scheduling=True, max_num_batched_tokens=64)
    steps = open_engine(async_scheduling=False, max_num_batched_tokens=64)
    have = tokens_of(run(ahead, prompts, params))
    check(ahead, prompts, params, have, tokens_of(run(steps, prompts, params)))


@pytest.mark.parametrize("block_size", [8, 16])
def test_cached_prefixes_and_computed_ones(open_engine, reference, check, block_size):
    """The second time all full blocks are found, also those of the outputs."""
    prompts = random_prompts(8, seed=3, longest=70)
    cached = open_engine(block_size=block_size)
    want = alone(reference, prompts)
    longer = [p + t for p, t in zip(prompts, want, strict=True)]
    for batch in (prompts, prompts, longer, longer):
        have, want = tokens_of(run(cached, batch)), tokens_of(run(reference, batch))
        check(cached, batch, GREEDY, have, want)
    cache = cached.scheduler.tables.cache
    assert cache.num_hit_tokens > cache.num_queried_tokens / 2


def test_prefix_shared_by_running_requests(open_engine, reference, check):
    shared, ends = random_prompts(1, seed=4, shortest=50)[0], random_prompts(7, seed=5, longest=20)
    prompts = [shared + end for end in ends]
    engine = open_engine(block_size=8)
    run(engine, [shared])
    want = alone(reference, prompts)
    check(engine, prompts, GREEDY, tokens_of(run(engine, prompts)), want)
    assert engine.scheduler.tables.cache.num_hit_tokens >= 7 * (len(shared) // 8 - 1) * 8


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
def test_preempted_and_undisturbed(open_engine, reference, check, kind, ahead):
    prompts = random_prompts(6, seed=6, shortest=20, longest=48)
    params = {
        "greedy": [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 6,
        "sampled": seeded(6, max_tokens=40),
        "penalised": seeded(6, max_tokens=40, presence_penalty=0.7, frequency_penalty=0.4),
    }[kind]
    want = tokens_of(run(reference, prompts, params))
    engine = open_engine(
        block_size=8,
        preemption_threshold=1.0,
        async_scheduling=ahead,
        num_gpu_blocks_override=36,  # of the 6 * 10 or so that are needed at the end
    )
    steps = recorded(engine)
    have = tokens_of(run(engine, prompts, params))
    preempted = [r for step in steps for r in step.preempted]
    assert len(preempted) >= 2 and any(r.output_token_ids for r in preempted)
    check(engine, prompts, params, have, want)


@pytest.mark.parametrize("params", [GREEDY, seeded(20, max_tokens=6)], ids=["greedy", "sampled"])
def test_every_number_of_rows_and_alone(open_engine, check, params):
    """1 to 20 rows: all row buckets and their padding."""
    prompts = random_prompts(20, seed=7, longest=30)
    each = params if isinstance(params, list) else [params] * 20
    engine = open_engine(max_num_seqs=20)
    want = alone(engine, prompts, each)
    for rows in range(1, 21):
        have = tokens_of(run(engine, prompts[:rows], each[:rows]))
        check(engine, prompts[:rows], each[:rows], have, want[:rows])


def test_samples_of_one_prompt_are_separately_seeded_requests(open_engine, reference, check):
    prompt = random_prompts(1, seed=8, shortest=21, longest=22)[0]

    def seeds(seed):
        params = SamplingParams(seed=seed)
        return [request_seed(Request("r", [1], params, index=i), 0) for i in range(4)]

    base = next(s for s in itertools.count(1) if max(seeds(s)) <= MAX_SEED)
    options = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    engine = open_engine(block_size=8)
    (output,) = run(engine, [prompt], SamplingParams(n=4, seed=base, **options))
    singles = [SamplingParams(seed=seed, **options) for seed in seeds(base)]
    want = alone(reference, [prompt] * 4, singles)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    check(engine, [prompt] * 4, singles, [c.token_ids for c in output.outputs], want)
    assert len(set(map(tuple, want))) == 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_of_samples_brings_every_token_and_each_end_once(open_engine, ahead):
    """Samples that end in one step, and some that end before by a stop token."""
    engine = open_engine(async_scheduling=ahead, enable_prefix_caching=False)
    prompt = random_prompts(1, seed=15)[0]
    whole = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=9, ignore_eos=True)
    middle = run(engine, [prompt], whole)[0].outputs[0].token_ids[4]
    for stop in ((), (middle,)):
        params = dataclasses.replace(whole, stop_token_ids=stop)
        want = run(engine, [prompt], params)[0].outputs
        engine.add_request("s", {"prompt_token_ids": prompt}, params, stream=True)
        tokens, texts, ends, finished = [[], [], []], ["", "", ""], [], []
        while engine.has_unfinished_requests():
            for output in engine.step():
                finished.append(output.finished)
                for part in output.outputs:
                    tokens[part.index] += part.token_ids
                    texts[part.index] += part.text
                    ends += [part.index] if part.finish_reason else []
        assert tokens == [c.token_ids for c in want]
        assert texts == [c.text for c in want]
        assert sorted(ends) == [0, 1, 2]
        assert finished.index(True) == len(finished) - 1
        assert (len({len(c.token_ids) for c in want}) > 1) == bool(stop)


def sampled_rows(steps):
    """How many tokens were launched, by request."""
    return Counter(row.request.request_id for step in steps for row in step.sampling_rows)


@pytest.mark.parametrize("end", ["token", "text", "length"])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_end_discards_at_most_one_token_and_its_block_is_not_found(
    open_engine, reference, check, end, ahead
):
    """Prompts of 1 to 17 tokens, so that the end falls on every place of a block of 8."""
    prompts = [random_prompts(1, seed=100 + n, shortest=n, longest=n + 1)[0] for n in range(1, 18)]
    engine = open_engine(block_size=8, async_scheduling=ahead)
    steps = recorded(engine)
    want = alone(reference, prompts)
    num_ended = 0
    for prompt, tokens in zip(prompts, want, strict=True):
        text = reference.tokenizer.decode([tokens[5]], False)
        options = {
            "token": {"stop_token_ids": [tokens[5]]},
            "text": {"stop": [text] if text and "\ufffd" not in text else ["\0"]},
            "length": {"max_tokens": 6},
        }[end]
        params = SamplingParams(
            **{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options}
        )
        steps.clear()
        (output,) = run(engine, [prompt], params)
        completion = output.outputs[0]
        stopped = completion.finish_reason == "stop"
        num_ended += len(completion.token_ids) < 12
        extra = sampled_rows(steps)["0"] - len(completion.token_ids)
        # Nothing is launched past the length; nor is the last step, when it is the length's own.
        allowed = {1} if len(completion.token_ids) < params.max_tokens else {0}
        assert extra in (allowed if ahead and stopped else {0})
        # Another request finds the blocks: it continues with other tokens than the discarded one.
        longer = [*prompt, *completion.token_ids, 7, 8, 9, 10, 11, 12, 13, 14, 15]
        have = tokens_of(run(engine, [longer]))
        check(engine, [longer], GREEDY, have, alone(reference, [longer]))
    assert num_ended > 8
    assert engine.scheduler.tables.cache.num_hit_tokens > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_abort_in_flight_frees_what_others_use_at_once(open_engine, reference, check, ahead):
    prompts = random_prompts(8, seed=9)
    want = alone(reference, prompts)
    engine = open_engine(async_scheduling=ahead, max_num_seqs=4, block_size=8)
    outputs = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, GREEDY)
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            break
        outputs |= {int(o.request_id): o for o in engine.step()}
        if step in (0, 2, 5):  # in the prompt, in flight, in the middle
            aborted = engine.abort_request(str(step % 3))
            if aborted is not None:
                assert aborted.outputs[0].finish_reason == "abort"
        engine.scheduler.check_integrity()
    kept = sorted(outputs)
    assert len(kept) >= 5
    have = [outputs[i].outputs[0].token_ids for i in kept]
    check(engine, [prompts[i] for i in kept], GREEDY, have, [want[i] for i in kept])


def test_more_table_entries_than_a_step_holds(open_engine, reference, check):
    """A long cached prefix that several rows join with at once."""
    prompt = random_prompts(1, seed=10, shortest=150, longest=151)[0]
    engine = open_engine(block_size=8, max_num_batched_tokens=16, max_num_seqs=4)
    want = alone(reference, [prompt])
    run(engine, [prompt])
    assert engine.results["edits"] == 0
    have = tokens_of(run(engine, [prompt] * 4))
    assert engine.results["edits"] >= 3
    check(engine, [prompt] * 4, GREEDY, have, want * 4)


def test_close_with_steps_in_flight(open_engine):
    prompts = random_prompts(5, seed=11)
    engine = open_engine(async_scheduling=True)
    want = tokens_of(run(engine, prompts))
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, GREEDY)
    for _ in range(3):
        engine.step()
    assert engine.results["open"] > 0
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()
    assert tokens_of(run(open_engine(async_scheduling=True), prompts)) == want


@pytest.mark.parametrize(
    "broken", ["prefill.filter", "decode.filter", "logprobs", "score", "finish"]
)
def test_after_an_error_all_streams_end_and_the_engine_goes_on(open_llm, monkeypatch, broken):
    """More often than there are places for results, so that one that is lost is missed."""
    llm = open_llm(async_scheduling=True)
    prompts = [{"prompt_token_ids": p} for p in random_prompts(2, seed=12)]
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1
    )
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    runner, executor = llm.engine._runner, llm.engine.backend.executor
    finish, plain_run = runner.finish, executor.run

    def fail_run(program, *args, **options):
        if program == broken:
            raise RuntimeError("broken")
        return plain_run(program, *args, **options)

    def fail_finish(running):
        raise KeyboardInterrupt

    for _ in range(10):
        first, second = (llm.stream(prompt, params) for prompt in prompts)
        next(second)
        with monkeypatch.context() as patch:
            patch.setattr(executor, "run", fail_run)
            if broken == "finish":
                patch.setattr(runner, "finish", fail_finish)
            with pytest.raises(KeyboardInterrupt if broken == "finish" else RuntimeError):
                list(first)
        assert list(second)[-1].outputs[0].finish_reason == "abort"
        assert llm.engine.results["open"] == 0
        llm.engine.scheduler.check_integrity()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == want
    assert finish == runner.finish and llm._inbox == {}


def test_ctrl_c_returns_what_there_is(open_llm):
    llm = open_llm(max_num_seqs=2)
    prompts = [{"prompt_token_ids": p} for p in random_prompts(4, seed=13)]
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    step, num_steps = llm.engine.step, itertools.count(1)

    def interrupted():
        if next(num_steps) == 18:
            signal.raise_signal(signal.SIGINT)
        return step()

    llm.engine.step = interrupted
    outputs = llm.generate(prompts, GREEDY)
    llm.engine.step = step
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert reasons == ["length", "length", "abort", "abort"]
    have = [o.outputs[0].token_ids for o in outputs]
    assert 0 < len(have[2]) < 12
    assert have == [tokens[: len(h)] for h, tokens in zip(have, want, strict=True)]
    assert not llm.engine.has_unfinished_requests()
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)] == want
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_threads_generate_at_once(open_llm, reference, check):
    """None of them is the one that opened the engine."""
    llm = open_llm()
    prompts = random_prompts(12, seed=14)
    params = seeded(12)
    want = alone(reference, prompts, params)
    have, errors = {}, []

    def generate(start):
        try:
            for i in range(start, 12, 3):
                (output,) = llm.generate({"prompt_token_ids": prompts[i]}, params[i])
                have[i] = output.outputs[0].token_ids
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=generate, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    check(llm.engine, prompts, params, [have[i] for i in range(12)], want)
