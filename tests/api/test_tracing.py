"""`LLM(..., trace=path)`: on the CPU its ops; on a GPU its calls, then its kernels' times."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from tinyvllm import LLM, SamplingParams
from tinyvllm.driver import compile_queue, kernel
from tinyvllm.driver.cache import CompiledKernel
from tinyvllm.driver.calls import PHASES, call, phase
from tinyvllm.driver.recorder import recording
from tinyvllm.util import InputError

# Of the host for a token: is the slot free, inputs, launch, token ids; then the wait.
DECODE_CALLS = [
    "cuEventQuery",
    "cuMemcpyHtoDAsync",
    "cuEventRecord",
    "cuGraphLaunch",
    "cuMemcpyDtoHAsync",
    "cuEventRecord",
    "cuEventSynchronize",
]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def model(golden, **options):
    return LLM(str(golden / "llama_bias"), max_num_batched_tokens=512, **options)


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_on_the_cpu_the_ops_are_listed_and_it_says_so(golden, tmp_path):
    path = tmp_path / "trace.jsonl"
    with model(golden, device="cpu", trace=path) as llm:
        (traced,) = llm.generate("ab", GREEDY)
    with model(golden, device="cpu") as llm:
        (plain,) = llm.generate("ab", GREEDY)
    assert traced.outputs[0].token_ids == plain.outputs[0].token_ids
    note, *found = events(path)
    assert "no CUDA calls" in note["text"] and "ran on cpu" in note["text"]
    assert {e["event"] for e in found} == {"run", "op"}
    runs = [e for e in found if e["event"] == "run"]
    assert [r["name"] for r in runs] == ["prefill.plain"] + ["decode.plain"] * 3
    assert [r["phase"] for r in runs] == ["prefill"] + ["decode"] * 3
    first = found[1 : found.index(runs[1])]
    assert [e["name"] for e in first[:4]] == [
        "apply_edits",
        "copy_blocks",
        "step_inputs",
        "embedding",
    ]
    assert first[-1]["name"] == "advance_rows"
    assert sum(e["seconds"] for e in first) <= runs[0]["seconds"]
    assert first[4]["args"]["y"] == "layer0.input_layernorm"


def test_without_a_trace_nothing_is_timed(golden):
    with model(golden, device="cpu") as llm:
        assert llm.engine.backend.executor._report is None
        with recording() as recorder:
            llm.generate("ab", GREEDY)
    assert recorder.calls == []


def test_the_times_come_from_a_pass_of_its_own_after_the_traced_one(golden, tmp_path, monkeypatch):
    """A backend that says it is asynchronous, as a GPU's does."""
    path = tmp_path / "trace.jsonl"
    llm = model(golden, device="cpu")
    llm.engine.backend.asynchronous = True
    llm.close()
    llm = model(golden, device="cpu", trace=path)
    llm.engine.backend.asynchronous = True
    llm.engine.backend.executor.report_times(None)
    params = SamplingParams(
        temperature=1, max_tokens=40, ignore_eos=True, n=2, logprobs=1, stop="x"
    )
    prompt = list(range(5, 45))  # all but the first time its blocks are cached
    for _ in range(10):
        llm.generate({"prompt_token_ids": prompt}, params)
    iterator = llm.stream("ab", GREEDY)
    next(iterator)  # and never finished
    before = len(events(path))
    llm.close()
    _, note, *found = [events(path)[0], *events(path)[before:]]
    assert "separate eager pass" in note["text"] and "programmatic dependent launch" in note["text"]
    runs = [e for e in found if e["event"] == "run"]
    assert [r["name"].split(".")[0] for r in runs] == ["prefill", "decode", "decode"]
    assert runs[0]["args"]["R"] == 8, "of many requests only a few"
    assert runs[0]["args"]["T"] == 8 * len(prompt), "nothing comes from the prefix cache"


def test_a_model_that_does_not_start_ends_the_trace(golden, tmp_path):
    for _ in range(2):  # the second finds no recording under way
        with pytest.raises(InputError, match="no such directory"):
            LLM(str(tmp_path / "none"), trace=tmp_path / "trace.txt")
    with (
        model(golden, device="cpu", trace=tmp_path / "trace.txt"),
        pytest.raises(InputError, match="recorded already"),
    ):
        model(golden, device="cpu", trace=tmp_path / "other.txt")
    with pytest.raises(InputError, match="trace="):
        model(golden, device="cpu", trace=tmp_path / "none" / "trace.txt")


@pytest.fixture
def fake_gpu(fake_driver, monkeypatch):
    """A GPU that runs nothing: kernels are not compiled, but launched with all they need."""

    def compiled(spec, *args):
        with phase("compile"):
            call("nvrtcVersion")
        return CompiledKernel(b"code", spec.name, None)

    monkeypatch.setattr(kernel, "LATER", 60)  # not while a test counts calls
    monkeypatch.setattr(compile_queue, "compile_spec", compiled)
    monkeypatch.setattr(kernel, "cached", lambda specs, *args: ((spec, None) for spec in specs))
    monkeypatch.setattr(kernel, "arch_name", lambda capability: "sm_90a")
    for name in ("cuModuleLoadData", "cuModuleGetFunction"):
        monkeypatch.setattr(fake_driver, name, fake_driver.handle, raising=False)
    results = {"cuFuncGetAttribute": 1024, "cuEventElapsedTime": 0.5}
    for name, result in results.items():
        monkeypatch.setattr(fake_driver, name, lambda *a, r=result: (0, r), raising=False)
    fake_driver.limit = 256 << 20
    return fake_driver


def test_every_call_of_a_gpus_life_and_then_its_kernels_times(golden, fake_gpu, tmp_path):
    path = tmp_path / "trace.jsonl"
    sizes = {"max_num_seqs": 4, "max_model_len": 128, "device": "cuda"}
    with model(golden, trace=path, **sizes) as llm:
        llm.generate(["abc", "de"], replace(GREEDY, max_tokens=9))
        seen = len(fake_gpu.names)
    found = events(path)
    calls = [e for e in found if e["event"] == "call"]
    names = [c["name"] for c in calls]
    # Kernels are loaded in a thread of their own, beside the weights.
    assert Counter(names[:seen]) == Counter(fake_gpu.names[:seen]), "nothing is left out"
    assert names[:2] == ["cuDriverGetVersion", "cuInit"] and names[-1] == fake_gpu.names[-1]
    main = [c["phase"] for c in calls if c["thread"] == "MainThread"]
    phases = [phase for phase, _ in groupby(main)]
    assert phases[:3] == ["start-up", "weights", "start-up"] and phases[-1] == "shut-down"
    first = {phase: phases.index(phase) for phase in phases}
    assert first["prefill"] < first["capture"] < first["shut-down"]
    beside = {c["phase"] for c in calls if c["thread"] != "MainThread"}
    assert beside == {"start-up", "compile"} and {*phases, *beside} == set(PHASES) - {"swap"}
    compiled = [c["phase"] for c in calls].index("compile")
    assert compiled < [c["phase"] for c in calls].index("prefill")
    threshold = next(c["args"] for c in calls if c["name"] == "cuMemPoolSetAttribute")
    assert "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD" in threshold.values()

    text = (Path(__file__).parents[2] / "docs" / "cuda-calls.md").read_text()
    not_made = text.partition("## Calls that this run does not make")[2]
    assert not set(re.findall(r"\bcu\w+", not_made)) & set(names)

    launches = [c["args"] for c in calls if c["name"] == "cuLaunchKernelEx"]
    assert launches and all(a["kernel"] and a["arguments"] for a in launches)
    rope = next(a for a in launches if a["kernel"].startswith("rope_kv_write_kernel"))
    assert rope["arguments"]["num_heads"] == 4 and rope["arguments"]["qkv"].startswith("0x")

    captured = False  # meanwhile no kernel is loaded: the driver may refuse that
    for name in names:
        captured = name == "cuStreamBeginCapture" or (captured and name != "cuStreamEndCapture")
        assert not (captured and name.startswith("cuModule"))

    # A token in a steady decode: one graph, one copy each way, one wait; nothing is allocated.
    decode = [c["name"] for c in calls if c["phase"] == "decode"]
    last = len(decode) - 1 - decode[::-1].index("cuGraphLaunch")
    start = len(decode[:last]) - 1 - decode[:last][::-1].index("cuGraphLaunch")
    assert sorted(decode[start:last]) == sorted(DECODE_CALLS)

    ops = [e for e in found if e["event"] == "op"]
    assert {e["track"] for e in ops} == {"compute stream"}
    assert all(e["seconds"] == 0.5e-3 for e in ops)
    assert {e["name"] for e in ops} <= {a["kernel"] for a in launches}
    assert "cuEventElapsedTime" in fake_gpu.names and "cuEventElapsedTime" not in names


@pytest.mark.gpu
def test_on_a_gpu_every_call_from_the_first_to_the_last(golden, tmp_path):
    path = tmp_path / "trace.jsonl"
    with model(golden, device="cuda", trace=path) as llm:
        llm.generate(["ab", "cd"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    found = events(path)
    calls = [e for e in found if e["event"] == "call"]
    names = [c["name"] for c in calls]
    assert names[:2] == ["cuDriverGetVersion", "cuInit"]
    assert names[-1] == "cuDevicePrimaryCtxRelease" and calls[-1]["phase"] == "shut-down"
    assert {"start-up", "weights", "capture", "prefill", "decode"} <= {c["phase"] for c in calls}
    starts = [c["start"] for c in calls if c["thread"] == "MainThread"]
    assert starts == sorted(starts)
    for c in calls:
        assert isinstance(c["args"], dict) and not any(n.isdigit() for n in c["args"]), c
    launches = [c["args"] for c in calls if c["name"] == "cuLaunchKernelEx"]
    assert all(a["kernel"] and len(a["grid"]) == 3 and a["arguments"] for a in launches)
    assert any(a["attributes"] for a in launches)
    assert "cuEventElapsedTime" not in names, "the timed pass is not part of the listing"
    ops = [e for e in found if e["event"] == "op"]
    assert {e["track"] for e in ops} == {"compute stream"}
    assert all(0 < e["seconds"] < 0.1 for e in ops)
    assert {e["name"] for e in ops} <= {a["kernel"] for a in launches}
