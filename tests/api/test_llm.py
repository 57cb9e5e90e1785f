"""The offline API on a tiny golden model: results, streams, ends of requests, errors."""

import gc
import json
import re
import shutil
import threading
import time

import pytest

from tinyvllm import LLM, SamplingParams
from tinyvllm.driver.device import cuda_unavailable
from tinyvllm.util import InputError

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
OPTIONS = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def llm(golden):
    with LLM(str(golden / "llama_bias"), **OPTIONS) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.blocks.num_used == 0
    assert llm._inbox == {}


def ids(prompt):
    return {"prompt_token_ids": prompt}


def test_while_prompts_run_the_collector_leaves_alone_what_there_was(llm, monkeypatch):
    gc.unfreeze()  # what loops of servers have frozen, in other tests
    counts = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: counts.append(gc.get_freeze_count()) or step())
    llm.generate([ids([1, 2, 3])], GREEDY)
    assert min(counts) > 1000 and gc.get_freeze_count() == 0
    gc.freeze()
    try:
        llm.generate([ids([1, 2, 3])], GREEDY)
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_results_come_in_the_order_of_the_prompts(llm, cases):
    outputs = llm.generate([ids(prompt) for prompt, _ in cases], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [want for _, want in cases]
    assert [o.prompt_token_ids for o in outputs] == [prompt for prompt, _ in cases]
    assert all(o.prompt is None and o.finished for o in outputs)
    assert len({o.request_id for o in outputs}) == len(outputs)


def test_one_prompt_needs_no_list_and_text_is_tokenized(llm):
    (output,) = llm.generate("ab", GREEDY)
    assert output.prompt == "ab"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("ab")
    (again,) = llm.generate(ids(output.prompt_token_ids), GREEDY)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_params_may_be_one_each_or_default(llm, cases):
    prompts = [ids(prompt) for prompt, _ in cases[:2]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(InputError, match="2 sampling_params for 1 prompts"):
        llm.generate(prompts[:1], params)
    assert len(llm.generate(prompts[0])[0].outputs[0].token_ids) <= 16
    assert llm.generate([], GREEDY) == []


def test_stream_deltas_join_to_the_text(llm, cases):
    for prompt, want in cases:
        (whole,) = llm.generate(ids(prompt), GREEDY)
        outputs = list(llm.stream(ids(prompt), GREEDY))
        assert "".join(o.outputs[0].text for o in outputs) == whole.outputs[0].text
        assert [o.outputs[0].token_ids for o in outputs] == [[token] for token in want]
        assert [o.outputs[0].finish_reason for o in outputs] == [None] * 15 + ["length"]


def test_streams_are_interleaved_with_each_other_and_with_generate(llm, cases):
    (a, want_a), (b, want_b), (c, want_c) = cases[1:4]
    first, second = llm.stream(ids(a), GREEDY), llm.stream(ids(b), GREEDY)
    outputs = [next(first), next(second), next(first)]
    assert [o.outputs[0].token_ids for o in outputs] == [want_a[:1], want_b[:1], want_a[1:2]]
    assert llm.generate(ids(c), GREEDY)[0].outputs[0].token_ids == want_c
    rest_a, rest_b = list(first), list(second)
    assert [o.outputs[0].token_ids for o in rest_a] == [[token] for token in want_a[2:]]
    assert [o.outputs[0].token_ids for o in rest_b] == [[token] for token in want_b[1:]]


def test_leaving_a_stream_ends_the_request(llm, cases):
    for n, _ in enumerate(llm.stream(ids(cases[5][0]), GREEDY)):
        if n == 3:
            break
    llm.generate(ids([5]), SamplingParams(temperature=0, max_tokens=1))


def first_new(tokens):
    """A place, after at least three tokens, of a token that does not come before."""
    return next(i for i in range(3, len(tokens)) if tokens[i] not in tokens[:i])


def test_stop_token_ids_end_a_request_and_are_not_in_its_text(llm, cases):
    prompt, want = cases[2]
    position = first_new(want)
    stop = want[position]
    params = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[stop, 511])
    (output,) = llm.generate(ids(prompt), params)
    completion = output.outputs[0]
    assert completion.token_ids == want[: position + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    short = SamplingParams(temperature=0, max_tokens=position, ignore_eos=True)
    assert completion.text == llm.generate(ids(prompt), short)[0].outputs[0].text
    streamed = list(llm.stream(ids(prompt), params))
    assert "".join(o.outputs[0].text for o in streamed) == completion.text
    assert streamed[-1].outputs[0].stop_reason == stop


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_every_end_of_sequence_id_counts(golden, cases, tmp_path, file):
    """An id of the golden output made an end-of-sequence id, in either file, beside another."""
    prompt, want = cases[2]
    model = shutil.copytree(golden / "llama_bias", tmp_path / "model")
    position = first_new(want)
    config = json.loads((model / file).read_text())
    (model / file).chmod(0o644)
    (model / file).write_text(json.dumps(config | {"eos_token_id": [2, want[position]]}))
    with LLM(str(model), **OPTIONS) as llm:
        (output,) = llm.generate(ids(prompt), SamplingParams(temperature=0))
        assert output.outputs[0].token_ids == want[: position + 1]
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason is None
        assert llm.generate(ids(prompt), GREEDY)[0].outputs[0].token_ids == want


def test_without_max_tokens_a_request_goes_on_to_max_model_len(golden, cases):
    prompt = cases[1][0]
    with LLM(str(golden / "llama_bias"), max_model_len=40, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (output,) = llm.generate(ids(prompt), params)
        assert len(output.outputs[0].token_ids) == 40 - len(prompt)
        assert output.outputs[0].finish_reason == "length"
        (last,) = llm.generate(ids([7] * 39), params)
        assert len(last.outputs[0].token_ids) == 1
        with pytest.raises(InputError, match=r"40 tokens; it may have 39.*max_model_len=40"):
            llm.generate(ids([7] * 40), params)


BAD_PROMPTS = [
    (ids([]), "empty"),
    ("", "empty"),
    (ids([5, 512]), r"prompt\[1\]=512: token ids are from 0 to 511"),
    (ids([-1]), r"prompt\[0\]=-1"),
    (ids([True]), "True: a token id is an integer"),
    (ids([1.0]), "1.0: a token id is an integer"),
    (ids(["5"]), "'5': a token id is an integer"),
    (ids("abc"), "a prompt is text or"),
    (ids(None), "a prompt is text or"),
    ({"prompt_token_ids": [1], "prompt": "a"}, "a prompt is text or"),
    ({}, "a prompt is text or"),
    ("\ud800", "lone surrogate"),
    (ids([5] * 3000), "3000 tokens; it may have"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_an_error_and_nothing_runs(llm, prompt, message):
    with pytest.raises(InputError, match=message):
        llm.generate([ids([5]), prompt], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(InputError, match=message):
        llm.stream(prompt, GREEDY)


@pytest.mark.parametrize("prompt", [5, None, b"bytes", [5]])
def test_a_prompt_of_another_type_is_an_error(llm, prompt):
    with pytest.raises(InputError, match=re.escape(f"not {prompt!r}")):
        llm.generate([prompt], GREEDY)


def test_a_bad_request_does_not_disturb_others(llm, cases):
    prompt, want = cases[3]
    stream = llm.stream(ids(prompt), GREEDY)
    outputs = [next(stream), next(stream)]
    with pytest.raises(InputError):
        llm.generate([ids([9]), ids([512])], GREEDY)
    with pytest.raises(InputError, match="stop_token_ids"):
        llm.generate(ids([9]), SamplingParams(stop_token_ids=[512]))
    with pytest.raises(InputError):
        llm.stream(ids([]), GREEDY)
    outputs += stream
    assert [o.outputs[0].token_ids for o in outputs] == [[token] for token in want]


def test_after_an_error_in_a_step_nothing_of_generate_goes_on(llm, cases, monkeypatch):
    def fail(*args):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.backend.executor, "run", fail)
        with pytest.raises(RuntimeError, match="broken"):
            llm.generate([ids(cases[2][0]), ids([5])], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    prompt, want = cases[2]
    assert llm.generate(ids(prompt), GREEDY)[0].outputs[0].token_ids == want


def test_unknown_options_are_type_errors_that_name_them(golden):
    with pytest.raises(TypeError, match="max_num_sequences"):
        LLM(str(golden / "llama_bias"), max_num_sequences=4)
    with pytest.raises(TypeError, match="top_z"):
        SamplingParams(top_z=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4096}, "max_model_len=4096: the model ends at .*2048"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size": 12}, "block_size=12: must be one of 8, 16, 32, 64"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"gpu_memory_utilization": 1e-6}, "does not fit"),
    ],
)
def test_options_out_of_range_are_input_errors(golden, options, message):
    with pytest.raises(InputError, match=message):
        LLM(str(golden / "llama_bias"), **{**OPTIONS, **options})


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"), device="cpu")
    with pytest.raises(InputError, match=r"config\.json"):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.skipif(cuda_unavailable() is None, reason="CUDA can be used here")
def test_cuda_asked_for_and_not_there(golden):
    with pytest.raises(InputError, match="device='cuda'"):
        LLM(str(golden / "llama_bias"), device="cuda")


def test_without_cuda_the_default_device_is_the_cpu(golden, cases):
    prompt, want = cases[1]
    with LLM(str(golden / "llama_bias"), max_num_batched_tokens=512) as llm:
        expected = "cuda" if cuda_unavailable() is None else "cpu"
        assert llm.engine.backend.device_name.startswith(expected)
        assert llm.generate(ids(prompt), GREEDY)[0].outputs[0].token_ids == want


def test_tokens_from_the_prefix_cache_are_reported(llm):
    prompt = ids([77] * 40)
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_stats_while_another_thread_generates(golden, monkeypatch):
    """They come after the step under way: the other thread does not take the lock again first."""
    with LLM(str(golden / "llama_bias"), **OPTIONS) as llm:
        step = llm.engine.step

        def slow_step():
            time.sleep(0.003)  # a wait for the device
            return step()

        monkeypatch.setattr(llm.engine, "step", slow_step)
        prompts = [{"prompt_token_ids": [3] * 9}] * 8
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        worker = threading.Thread(target=llm.generate, args=(prompts, params))
        worker.start()
        seen = []
        while worker.is_alive():
            seen.append(llm.stats())
            time.sleep(0.0005)
        worker.join()
        last = llm.stats()
        assert last.generation_tokens == 800 and last.num_steps >= 100
    steps = [stats.num_steps for stats in seen]
    assert steps == sorted(steps)
    assert len(set(steps)) > 85, "nearly every step is seen"
    assert any(stats.num_requests_running == 8 and stats.fragmentation > 0 for stats in seen)
