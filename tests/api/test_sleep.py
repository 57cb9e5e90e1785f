"""Sleep and wake through the offline API: the same tokens, clear errors. On the CPU and a GPU."""

import logging
import shutil

import pytest

from tinyvllm import LLM, SamplingParams
from tinyvllm.util import InputError

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=3, logprobs=2)
PROMPTS = [{"prompt_token_ids": list(range(3 + i, 40 + 5 * i))} for i in range(4)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_name(request):
    return request.param


@pytest.fixture
def open_llm(golden, tmp_path, device_name):
    """Opens LLMs of a copy of a golden model, whose directory is `.path`, and closes them."""
    opened = []

    def open_one(**options):
        path = shutil.copytree(golden / "llama_bias", tmp_path / "model", dirs_exist_ok=True)
        options = {"model": str(path), "device": device_name, **OPTIONS, **options}
        opened.append(LLM(**options))
        opened[-1].path = path
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


def results(llm, params):
    """Tokens and log-probabilities of all prompts."""
    outputs = [o.outputs[0] for o in llm.generate(PROMPTS, params)]
    return [(o.token_ids, o.logprobs) for o in outputs]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"load_format": "dummy"}],
    ids=["graphs", "eager", "dummy"],
)
def test_results_are_the_same_before_and_after(open_llm, device_name, level, options):
    llm = open_llm(enable_prefix_caching=False, **options)
    want = [results(llm, params) for params in (GREEDY, SAMPLED)]
    for _ in range(2):
        llm.sleep(level)
        assert llm.is_sleeping()
        llm.wake_up()
        assert not llm.is_sleeping()
        assert [results(llm, params) for params in (GREEDY, SAMPLED)] == want


def test_asleep_requests_are_refused_and_waking_serves_them(open_llm):
    llm = open_llm()
    want = results(llm, GREEDY)
    llm.sleep()
    for request in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.stream(PROMPTS[0], GREEDY)):
        with pytest.raises(RuntimeError, match=r"sleeps.*wake_up\(\)"):
            request()
    assert llm.engine.step() == [] and llm._inbox == {}
    llm.wake_up()
    assert results(llm, GREEDY) == want


def test_sleep_needs_that_nothing_runs_and_disturbs_nothing(open_llm):
    llm = open_llm()
    want = results(llm, GREEDY)[0][0]
    stream = llm.stream(PROMPTS[0], GREEDY)
    tokens = next(stream).outputs[0].token_ids
    for level in (1, 2):
        with pytest.raises(InputError, match="requests are unfinished"):
            llm.sleep(level)
    tokens += [token for output in stream for token in output.outputs[0].token_ids]
    assert tokens == want
    llm.sleep()


@pytest.mark.parametrize("level", [0, 3, True, 1.0, "1", None])
def test_other_levels_are_refused(open_llm, level):
    llm = open_llm()
    with pytest.raises(InputError, match=f"level={level!r}"):
        llm.sleep(level)
    assert not llm.is_sleeping()


def test_twice_is_once(open_llm, caplog):
    llm = open_llm()
    want = results(llm, GREEDY)
    with caplog.at_level(logging.WARNING, "tinyvllm"):
        llm.wake_up()
        llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        llm.wake_up()
    assert [r.getMessage() for r in caplog.records] == [
        "wake_up: the engine is not sleeping",
        "sleep(level=1): the engine is sleeping already",
        "wake_up: the engine is not sleeping",
    ]
    assert results(llm, GREEDY) == want


def test_cached_prefixes_are_forgotten(open_llm):
    llm = open_llm()

    def cached():
        return llm.generate(PROMPTS[0], GREEDY)[0].num_cached_tokens

    assert cached() == 0 and cached() == 32
    llm.sleep()
    llm.wake_up()
    assert cached() == 0 and cached() == 32
    assert llm.reset_prefix_cache() is True
    assert cached() == 0 and cached() == 32
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert llm.reset_prefix_cache() is False
    assert list(stream)[-1].finished
    assert cached() == 32
    llm.engine.scheduler.check_integrity()


def test_files_that_are_gone_leave_it_asleep(open_llm):
    llm = open_llm()
    want = results(llm, GREEDY)
    llm.sleep(2)
    llm.path.rename(llm.path.parent / "away")
    for _ in range(2):
        with pytest.raises(InputError, match=str(llm.path)):
            llm.wake_up()
        assert llm.is_sleeping()
    (llm.path.parent / "away").rename(llm.path)
    llm.wake_up()
    assert results(llm, GREEDY) == want
    llm.sleep(1)  # which needs no files
    llm.path.rename(llm.path.parent / "away")
    llm.wake_up()
    assert results(llm, GREEDY) == want


def test_closed_it_neither_sleeps_nor_wakes(open_llm):
    llm = open_llm()
    llm.sleep(1)
    llm.close()
    llm.close()
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(RuntimeError, match="closed"):
            call()
