"""The engine on the CPU against golden models, and against itself under other schedules."""

import json
import pickle

import numpy as np
import pytest
from driving import recorded, tokens_of
from driving import run as run_queued

from tinyvllm.config import EngineConfig
from tinyvllm.engine import runner as runner_module
from tinyvllm.engine.batch import build_batch
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import InputError

MODELS = ("llama3_rope", "llama_sharded", "mistral", "llama_bias")
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SIZES = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 512}


@pytest.fixture
def open_engine(golden):
    """Opens engines by the model's name and options, and closes them."""
    engines = []

    def open_one(name, **options):
        engine = LLMEngine(EngineConfig(model=str(golden / name), **{**SIZES, **options}))
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture
def cases(golden):
    """Reads a model's golden prompts, outputs and logits."""

    def read(name):
        cases = json.loads((golden / name / "golden.json").read_text())["cases"]
        logits = np.load(golden / name / "golden.npz")
        return [
            (c["prompt_token_ids"], c["output_token_ids"], logits[c["logits_key"]]) for c in cases
        ]

    return read


def run(engine, prompts, params=GREEDY):
    return run_queued(engine, prompts, params)


def run_to_end(engine):
    """Everything that the engine reports until nothing is left to do."""
    news = []
    while engine.has_unfinished_requests():
        news += engine.step()
    return news


def step_logits(engine):
    """Runs one step of a prompt, fetching its logits too."""
    step = engine.scheduler.schedule()
    batch = build_batch(step, engine.config.seed, engine.backend.limits)
    result = engine.backend.executor.run(
        "prefill.filter", batch.dims, batch.inputs, ("tokens", "logits")
    ).get()
    engine.scheduler.update(step, result["tokens"].tolist())
    return result["logits"]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logits_are_the_golden_ones(open_engine, cases, name):
    prompts, wanted, logits = zip(*cases(name), strict=True)
    engine = open_engine(name)
    outputs = run(engine, prompts)
    assert tokens_of(outputs) == list(wanted)
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    one = SamplingParams(temperature=0, max_tokens=1)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, one)
    have = step_logits(engine)
    assert have.shape == (len(prompts), 512)
    np.testing.assert_allclose(have, np.stack(logits), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prompts_mixed_with_decodes_give_the_same_tokens(open_engine, cases, name):
    prompts, wanted, _ = zip(*cases(name), strict=True)
    engine = open_engine(name, max_num_batched_tokens=16, max_num_seqs=4)
    steps = recorded(engine)
    assert tokens_of(run(engine, prompts)) == list(wanted)
    assert any(step.num_decodes and step.prefill_rows for step in steps), "no step was mixed"
    assert max(step.num_tokens for step in steps) == 16


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_size_makes_no_difference(open_engine, cases, block_size):
    prompts, wanted, _ = zip(*cases("llama_bias"), strict=True)
    assert tokens_of(run(open_engine("llama_bias", block_size=block_size), prompts)) == list(wanted)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64, "max_num_seqs": 6}])
def test_preempted_requests_give_the_same_tokens(open_engine, cases, options):
    """40 blocks hold the prompts, 52 would be needed at the end; the latest arrivals go."""
    prompts, wanted, _ = zip(*reversed(cases("llama_bias")), strict=True)
    engine = open_engine(
        "llama_bias",
        block_size=8,
        preemption_threshold=1.0,
        num_gpu_blocks_override=42,
        **options,
    )
    assert engine.backend.memory.num_blocks == 42
    steps = recorded(engine)
    params = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    outputs = run(engine, prompts, params)
    assert sum(len(step.preempted) for step in steps) >= 2
    assert tokens_of(outputs) == list(wanted)
    for output in outputs:
        assert len(output.outputs[0].logprobs) == 16
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_logprobs_are_those_of_the_golden_logits(open_engine, cases):
    prompts, wanted, logits = zip(*cases("llama_sharded"), strict=True)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
    for output, tokens, row in zip(
        run(open_engine("llama_sharded"), prompts, params), wanted, logits, strict=True
    ):
        want = log_softmax(row)
        entry = output.outputs[0].logprobs[0]
        top = np.argsort(-row)[:5].tolist()
        assert list(entry) == top, "the chosen (greedy) token is the first of the top five"
        assert top[0] == tokens[0]
        for rank, token in enumerate(top, 1):
            assert entry[token].rank == rank
            assert entry[token].logprob == pytest.approx(want[token], abs=1e-3)
        chosen = [e[t].logprob for e, t in zip(output.outputs[0].logprobs, tokens, strict=False)]
        assert output.outputs[0].cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.parametrize("rows_at_a_time", [7, runner_module.SCORE_ROWS])
def test_scoring_prompt_and_output_gives_the_logprobs_of_the_output(
    open_engine, cases, monkeypatch, rows_at_a_time
):
    """Teacher-forced, in one prefill and in chunks, against token by token."""
    monkeypatch.setattr(runner_module, "SCORE_ROWS", rows_at_a_time)
    prompts, _, logits = zip(*cases("llama3_rope"), strict=True)
    sampled = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True, logprobs=3, seed=4)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    outputs = run(open_engine("llama3_rope"), prompts, sampled)
    whole = [p + t for p, t in zip(prompts, tokens_of(outputs), strict=True)]
    engines = [
        open_engine("llama3_rope"),
        open_engine("llama3_rope", max_num_batched_tokens=16, max_num_seqs=3),
    ]
    for scores in (run(engine, whole, scored) for engine in engines):
        for i, (output, score) in enumerate(zip(outputs, scores, strict=True)):
            assert len(score.prompt_logprobs) == len(whole[i])
            assert score.prompt_logprobs[0] is None
            want = output.outputs[0].logprobs
            have = score.prompt_logprobs[len(prompts[i]) :]
            for a, b, token in zip(want, have, output.outputs[0].token_ids, strict=True):
                assert next(iter(a)) == next(iter(b)) == token
                assert a.keys() == b.keys()
                assert [e.rank for e in a.values()] == [e.rank for e in b.values()]
                np.testing.assert_allclose(
                    [e.logprob for e in a.values()], [e.logprob for e in b.values()], atol=2e-4
                )
            token = output.outputs[0].token_ids[0]
            assert have[0][token].logprob == pytest.approx(log_softmax(logits[i])[token], abs=1e-3)


def test_requests_ask_for_different_logprobs_in_one_batch(open_engine, cases):
    prompts = [prompt for prompt, _, _ in cases("llama_bias")][:4]
    wanted = [None, 0, 20, 2]
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=n, prompt_logprobs=n)
        for n in wanted
    ]
    for output, n in zip(run(open_engine("llama_bias"), prompts, params), wanted, strict=True):
        completion = output.outputs[0]
        if n is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
            assert output.prompt_logprobs is None
            continue
        # The chosen token is the most likely one, so it is among the top ones if there are any.
        assert [len(entry) for entry in completion.logprobs] == [max(n, 1)] * 4
        for entry, token in zip(
            output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
        ):
            assert next(iter(entry)) == token
            assert len(entry) in (n, n + 1)
            top = [e.logprob for e in entry.values() if e.rank <= n]
            assert sorted(top, reverse=True) == sorted(top, key=lambda p: -p)
            assert len(top) >= n


def test_random_tokens_depend_on_seed_and_position_alone(open_engine, cases):
    prompts = [prompt for prompt, _, _ in cases("mistral")]
    params = [
        SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=100 + i)
        for i in range(len(prompts))
    ]
    together = tokens_of(run(open_engine("mistral"), prompts, params))
    engine = open_engine("mistral", max_num_batched_tokens=24, max_num_seqs=2, seed=5)
    alone = [
        tokens_of(run(engine, [prompt], [p]))[0] for prompt, p in zip(prompts, params, strict=True)
    ]
    chunked = tokens_of(run(engine, prompts, params))
    assert together == alone == chunked
    other = [SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=7)] * 2
    same, again = tokens_of(run(engine, [prompts[2]] * 2, other))
    assert same == again != together[2]


def test_without_a_seed_the_engine_seed_decides(open_engine, cases):
    prompt = cases("mistral")[2][0]
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def sampled(seed):
        return tokens_of(run(open_engine("mistral", seed=seed), [prompt] * 3, params))

    first = sampled(1)
    assert len({tuple(tokens) for tokens in first}) == 3, "requests differ from one another"
    assert sampled(1) == first
    assert not set(map(tuple, sampled(2))) & set(map(tuple, first))


def test_greedy_and_random_rows_share_a_batch(open_engine, cases):
    prompts, wanted, _ = zip(*cases("llama_bias"), strict=True)
    hot = SamplingParams(temperature=5.0, max_tokens=16, ignore_eos=True, seed=1)
    params = [GREEDY if i % 2 else hot for i in range(len(prompts))]
    tokens = tokens_of(run(open_engine("llama_bias"), prompts, params))
    for i, (have, want) in enumerate(zip(tokens, wanted, strict=True)):
        assert (have == want) == (i % 2 == 1)


def test_stream_reports_each_token_and_nobody_elses_text(open_engine, cases):
    (first, wanted, _), (second, other, _) = cases("llama_bias")[1:3]
    engine = open_engine("llama_bias")
    engine.add_request("s", {"prompt_token_ids": first}, GREEDY, stream=True)
    engine.add_request("g", {"prompt_token_ids": second}, GREEDY)
    news = []
    while engine.has_unfinished_requests():
        news += engine.step()
    streamed = [o for o in news if o.request_id == "s"]
    final = [o for o in news if o.request_id == "g"]
    assert [o.outputs[0].token_ids for o in streamed] == [[token] for token in wanted]
    assert [o.finished for o in streamed] == [False] * 15 + [True]
    assert len(final) == 1 and final[0].outputs[0].token_ids == other


def test_abort_frees_blocks_at_once_and_others_go_on(open_engine, cases):
    (first, _, _), (second, wanted, _) = cases("llama_bias")[4:6]
    engine = open_engine("llama_bias")
    engine.add_request("a", {"prompt_token_ids": first}, GREEDY, stream=True)
    engine.add_request("b", {"prompt_token_ids": second}, GREEDY)
    for _ in range(3):
        engine.step()
    used = engine.scheduler.blocks.num_used
    engine.abort_request("a")
    assert engine.scheduler.blocks.num_used < used
    engine.abort_request("unknown")
    news = []
    while engine.has_unfinished_requests():
        news += engine.step()
    assert [(o.request_id, o.outputs[0].token_ids) for o in news] == [("b", wanted)]
    assert engine.step() == []


def test_a_sample_whose_id_is_in_use_leaves_nothing_behind(open_engine):
    engine = open_engine("llama_bias")
    engine.add_request("a.1", {"prompt_token_ids": [5]}, GREEDY)
    with pytest.raises(InputError, match=r"'a\.1'.*not finished"):
        engine.add_request("a", {"prompt_token_ids": [6]}, SamplingParams(n=3))
    news = []
    while engine.has_unfinished_requests():
        news += engine.step()
    assert [o.request_id for o in news] == ["a.1"]


def test_what_goes_in_and_comes_out_can_be_pickled(open_engine):
    engine = open_engine("llama_bias")
    params = SamplingParams(n=2, logprobs=2, prompt_logprobs=1, stop=["x"], logit_bias={3: 1.0})
    sent = pickle.loads(pickle.dumps(("a", {"prompt_token_ids": [5, 6]}, params, engine.config)))
    engine.add_request(*sent[:3])
    (output,) = run_to_end(engine)
    assert sent[3] == engine.config and pickle.loads(pickle.dumps(output)) == output


def test_an_id_in_use_is_refused(open_engine):
    engine = open_engine("llama_bias")
    engine.add_request("a", {"prompt_token_ids": [5]}, GREEDY)
    with pytest.raises(InputError, match=r"'a'.*not finished"):
        engine.add_request("a", {"prompt_token_ids": [6]}, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("a", {"prompt_token_ids": [6]}, GREEDY)
