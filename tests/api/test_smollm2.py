"""SmolLM2-135M against another implementation in float32: text, log-probabilities, perplexity.

Teacher-forced: prompt and output are given, and each position's prediction is compared, since
after a near tie a free-running comparison says nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyvllm import LLM, SamplingParams

ONE_TOKEN = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with open(path, newline="\n") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def cpu(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), device="cpu", max_model_len=2048, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def cuda(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), device="cuda", max_model_len=2048, max_num_seqs=16) as llm:
        yield llm


def score(llm: LLM, sequences: list[list[int]]) -> list[list[tuple[float, int]]]:
    """(log-probability, rank) of each token but the first of each sequence."""
    params = SamplingParams(prompt_logprobs=0, **ONE_TOKEN)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], params)
    result = []
    for ids, output in zip(sequences, outputs, strict=True):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        entries = [p[token] for p, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        result.append([(entry.logprob, entry.rank) for entry in entries])
    return result


def compare_greedy(llm: LLM, golden: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every golden output token: error of its log-probability, its rank, its margin."""
    cases = read_jsonl(golden / "smollm2_greedy.jsonl")
    scored = score(llm, [c["prompt_token_ids"] + c["output_token_ids"] for c in cases])
    errors, ranks, margins = [], [], []
    for case, entries in zip(cases, scored, strict=True):
        entries = entries[-len(case["output_token_ids"]) :]
        errors += [e[0] - want for e, want in zip(entries, case["output_logprobs"], strict=True)]
        ranks += [rank for _, rank in entries]
        margins += case["margins"]
    assert len(errors) == 12 * 64
    return np.abs(errors), np.array(ranks), np.array(margins)


def nll_errors(llm: LLM, golden: Path) -> list[float]:
    """Relative error of the negative log-likelihood of each golden text."""
    cases = read_jsonl(golden / "smollm2_nll.jsonl")
    scored = score(llm, [c["token_ids"] for c in cases])
    sums = [-sum(logprob for logprob, _ in entries) for entries in scored]
    return [abs(s / c["nll_sum"] - 1) for s, c in zip(sums, cases, strict=True)]


def test_cpu_predicts_as_the_oracle(cpu: LLM, golden: Path) -> None:
    errors, ranks, margins = compare_greedy(cpu, golden)
    assert errors.max() <= 1e-2
    assert (ranks[margins > 0.01] == 1).all()
    assert max(nll_errors(cpu, golden)) <= 1e-3


def test_cpu_writes_as_the_oracle(cpu: LLM, golden: Path) -> None:
    """Free-running text, compared up to the first near tie."""
    for case in read_jsonl(golden / "smollm2_greedy.jsonl")[:3]:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        (output,) = cpu.generate(case["prompt"], params)
        assert output.prompt_token_ids == case["prompt_token_ids"]
        near_ties = [i for i, margin in enumerate(case["margins"]) if margin < 0.01]
        count = near_ties[0] if near_ties else 64
        assert count > 0 and output.outputs[0].token_ids[:count] == case["output_token_ids"][:count]
        if count == 64:
            assert output.outputs[0].text == case["output_text_skip_special"]


@pytest.mark.gpu
def test_gpu_predicts_as_the_oracle(cuda: LLM, golden: Path) -> None:
    errors, ranks, margins = compare_greedy(cuda, golden)
    assert np.median(errors) <= 0.05
    assert errors.max() <= 0.5
    assert (ranks[margins > 0.25] == 1).all()
    nll = nll_errors(cuda, golden)
    print(
        f"log-probability error: median {np.median(errors):.4f}, largest {errors.max():.3f}; "
        f"NLL error {max(nll):.2%}"
    )
    assert max(nll) <= 3e-3
