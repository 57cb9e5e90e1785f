"""Random requests for as long as one likes: right tokens, no leaked block, memory that stays flat.

`python tests/engine/test_soak.py --seconds 360 --device cuda` prints a line of what has happened.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from comparison import Comparison
from driving import run

from tinyvllm.config import EngineConfig
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.outputs import CompletionOutput
from tinyvllm.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "llama_bias"
LONG_SECONDS = 360
STEPS_TO_IDLE = 150  # steps with arrivals between two idle moments
MAX_COMPARED = 40  # requests computed again, alone
MEMORY_GROWTH = 256 << 20  # bytes: what graphs, kernels and the host's own caches may take
OTHERS = 4  # times at which other programs may take memory of the device, as much as they like
OPTIONS = {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,
    "max_model_len": 400,
    "block_size": 8,
    "scheduling_policy": "priority",
    "wait_for_kernels": True,  # later ones would take memory while that must not grow
}
NUM_BLOCKS = 60  # of the 12 * 50 that long rows would take


@dataclass
class Summary:
    """What a soak has seen."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    preempted_decoding: int = 0
    preempted_in_prompt: int = 0
    swapped: int = 0
    recomputed: int = 0
    prefix_hit_tokens: int = 0
    aborted: int = 0
    idle_moments: int = 0
    compared: int = 0
    equal: int = 0
    leaked_blocks: int = 0
    pool_used_before: int = 0
    pool_used_after: int = 0
    memory_before: int = 0
    memory_after: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


class Soak:
    """Drives an engine with random requests; `reference` computes some of them again, alone."""

    def __init__(self, engine: LLMEngine, reference: LLMEngine, seed: int) -> None:
        self.engine, self.reference = engine, reference
        self.rng = random.Random(seed)
        self.vocab = engine.model.config.vocab_size
        self.prefixes = [self._ids(self.rng.randint(10, 120)) for _ in range(6)]
        self.summary = Summary()
        self.memory: list[int] = []  # at each idle moment
        self.live: dict[str, tuple[list[int], SamplingParams, bool]] = {}
        self.parts: dict[str, dict[int, list[int]]] = {}  # tokens of streams so far
        self.kept: list[tuple[list[int], SamplingParams, list[CompletionOutput]]] = []

    def run(self, seconds: float) -> Summary:
        """Runs for so long, then compares; raises where anything is not as it should be."""
        summary, end = self.summary, time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(STEPS_TO_IDLE):
                self._arrive()
                self._abort()
                self._step()
            while self.engine.has_unfinished_requests():
                self._step()
            self._check_idle()
        self._compare()
        cache = self.engine.scheduler.tables.cache
        assert cache is not None
        summary.prefix_hit_tokens = cache.num_hit_tokens
        counts = self.engine.scheduler.num_preemptions
        summary.swapped, summary.recomputed = counts["swap"], counts["recompute"]
        return summary

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(3, self.vocab) for _ in range(count)]

    def _prompt(self) -> list[int]:
        kind = self.rng.random()
        if kind < 0.5:
            prefix = self.rng.choice(self.prefixes)
            return prefix[: self.rng.randint(1, len(prefix))] + self._ids(self.rng.randint(0, 12))
        if kind < 0.6:
            return list(self.rng.choice(self.prefixes))  # wholly cached, often
        return self._ids(self.rng.randint(150, 300) if kind < 0.63 else self.rng.randint(1, 40))

    def _params(self) -> SamplingParams:
        rng = self.rng

        def sometimes(chance: float, value: object, otherwise: object) -> object:
            return value if rng.random() < chance else otherwise

        temperature = sometimes(0.6, rng.choice([0.7, 1.0, 1.5]), 0.0)
        max_tokens = rng.randint(1, 60)
        options = {
            "temperature": temperature,
            "n": sometimes(0.15, rng.randint(2, 4), 1) if temperature else 1,
            "seed": rng.randrange(1 << 62),
            "max_tokens": max_tokens,
            "min_tokens": sometimes(0.1, rng.randint(0, max_tokens), 0),
            "ignore_eos": rng.random() < 0.7,
            "top_k": sometimes(0.15, rng.randint(1, 50), 0),
            "top_p": sometimes(0.15, rng.uniform(0.3, 1), 1.0),
            "min_p": sometimes(0.1, rng.uniform(0, 0.2), 0.0),
            "repetition_penalty": sometimes(0.08, rng.uniform(0.8, 1.5), 1.0),
            "presence_penalty": sometimes(0.1, rng.uniform(-1, 2), 0.0),
            "frequency_penalty": sometimes(0.1, rng.uniform(-0.2, 1), 0.0),
            "logit_bias": sometimes(0.08, {rng.randrange(self.vocab): 4.0}, None),
            "bad_words": sometimes(0.08, ["the", "q", "an"], ()),
            "logprobs": sometimes(0.15, rng.randint(0, 5), None),
            "prompt_logprobs": sometimes(0.08, rng.randint(0, 3), None),
            "stop": sometimes(0.15, [rng.choice("etaoinsz"), "qu"], ()),
            "stop_token_ids": sometimes(0.15, self._ids(4), ()),
        }
        return SamplingParams(**options)

    def _arrive(self) -> None:
        limit = 2 * self.engine.config.max_num_seqs
        while len(self.live) < limit and self.rng.random() < 0.3:
            name = str(self.summary.requests)
            prompt, params, stream = self._prompt(), self._params(), self.rng.random() < 0.3
            self.engine.add_request(
                name,
                {"prompt_token_ids": prompt},
                params,
                priority=self.rng.randint(0, 2),
                stream=stream,
            )
            self.live[name] = prompt, params, stream
            self.summary.requests += 1

    def _abort(self) -> None:
        if self.live and self.rng.random() < 0.02:
            name = self.rng.choice(list(self.live))
            output = self.engine.abort_request(name)
            assert output is not None and output.finished
            del self.live[name]
            self.parts.pop(name, None)
            self.summary.aborted += 1

    def _step(self) -> None:
        summary = self.summary
        summary.steps += 1
        for output in self.engine.step():
            prompt, params, stream = self.live[output.request_id]
            if stream:
                tokens = self.parts.setdefault(output.request_id, {})
                for part in output.outputs:
                    tokens.setdefault(part.index, []).extend(part.token_ids)
            if not output.finished:
                continue
            assert output.prompt_token_ids == prompt
            if stream:
                whole = self.parts.pop(output.request_id)
                summary.tokens += sum(map(len, whole.values()))
                outputs = [CompletionOutput(i, "", whole[i]) for i in sorted(whole)]
            else:
                outputs = output.outputs
                summary.tokens += sum(len(c.token_ids) for c in outputs)
                for completion in outputs:
                    assert completion.finish_reason in ("stop", "length")
                    if params.logprobs is not None:
                        assert completion.logprobs is not None
                        assert len(completion.logprobs) == len(completion.token_ids)
                if params.prompt_logprobs is not None:
                    assert output.prompt_logprobs is not None
                    assert len(output.prompt_logprobs) == len(prompt)
            assert len(outputs) == params.n
            del self.live[output.request_id]
            self._keep(prompt, params, outputs)

    def _keep(
        self, prompt: list[int], params: SamplingParams, outputs: list[CompletionOutput]
    ) -> None:
        """Each finished request stays with equal chance."""
        finished = self.summary.requests - len(self.live)
        if len(self.kept) < MAX_COMPARED:
            self.kept.append((prompt, params, outputs))
        elif (place := self.rng.randrange(finished)) < MAX_COMPARED:
            self.kept[place] = prompt, params, outputs

    def _check_idle(self) -> None:
        assert not self.live and not self.parts
        scheduler = self.engine.scheduler
        scheduler.end_copies()
        scheduler.check_integrity()
        self.summary.leaked_blocks = scheduler.blocks.num_used + scheduler.swaps.num_used
        assert self.summary.leaked_blocks == 0
        used, memory = self._memory()
        self.summary.idle_moments += 1
        if self.summary.idle_moments <= 2:  # by then arrays and graphs have been made
            self.summary.pool_used_before, self.summary.memory_before = used, memory
            self.memory.clear()
        self.memory.append(memory)
        self.summary.pool_used_after, self.summary.memory_after = used, memory
        assert used == self.summary.pool_used_before
        growth = sorted(b - a for a, b in pairwise(self.memory))
        others = OTHERS if self.engine.backend.asynchronous else 0
        assert sum(growth[: len(growth) - others]) < MEMORY_GROWTH  # a leak shows again and again

    def _memory(self) -> tuple[int, int]:
        """Bytes used of the device pool (0 on the CPU); of the device, or of the process."""
        executor = self.engine.backend.executor
        if not self.engine.backend.asynchronous:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return 0, pages * 4096
        executor._stream.synchronize()
        free, total = executor._loader.device.mem_info()
        return executor._pool.stats().used, total - free

    def _compare(self) -> None:
        comparison = Comparison(self.reference)
        exact = not self.engine.backend.asynchronous
        for prompt, params, outputs in self.kept:
            (alone,) = run(self.reference, [prompt], params)
            for have, want in zip(outputs, alone.outputs, strict=True):
                self.summary.compared += 1
                self.summary.equal += have.token_ids == want.token_ids
                if comparison.comparable(params):
                    comparison.check(
                        self.engine, prompt, params, have.token_ids, want.token_ids, have.index
                    )
                else:  # with filters, what rounding does cannot be told from other mistakes
                    assert have.token_ids == want.token_ids or not exact, (prompt, params)


@contextmanager
def soaking(model: str, device: str, seed: int, **options: object):
    """A soak of an engine with a small cache, with an engine to compare with."""
    config = {"model": model, "device": device, **OPTIONS, **options}
    with ExitStack() as stack:
        reference = LLMEngine(
            EngineConfig(
                **{**config, "enable_prefix_caching": False, "gpu_memory_utilization": 0.3}
            )
        )
        stack.callback(reference.close)
        engine = LLMEngine(EngineConfig(**config, num_gpu_blocks_override=NUM_BLOCKS))
        stack.callback(engine.close)
        soak = Soak(engine, reference, seed)
        schedule = engine.scheduler.schedule

        def counted():
            step = schedule()
            for request in step.preempted if step else ():
                if request.output_token_ids:
                    soak.summary.preempted_decoding += 1
                else:
                    soak.summary.preempted_in_prompt += 1
            return step

        engine.scheduler.schedule = counted
        yield soak


def check(summary: Summary) -> None:
    """That the soak has seen what it is for."""
    assert summary.requests > 30 and summary.aborted and summary.prefix_hit_tokens
    assert summary.preempted_decoding and summary.swapped and summary.recomputed
    assert summary.equal > summary.compared / 2


@pytest.mark.parametrize("ahead", [False, True])
def test_soak(ahead):
    with soaking(str(GOLDEN), "cpu", seed=6, async_scheduling=ahead) as soak:
        check(soak.run(seconds=1))


@pytest.mark.gpu(alone=True)  # the device's free memory tells whether something leaks
def test_short_soak_on_the_gpu():
    with soaking(str(GOLDEN), "cuda", seed=2) as soak:
        check(soak.run(seconds=4))


@pytest.mark.gpu(alone=True)
@pytest.mark.slow
@pytest.mark.timeout(LONG_SECONDS + 240)
def test_long_soak_on_the_gpu():
    with soaking(str(GOLDEN), "cuda", seed=3) as soak:
        check(soak.run(LONG_SECONDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LONG_SECONDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=str(GOLDEN), help="directory or preset")
    parser.add_argument("--load-format", default="auto", help="dummy, for a preset")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with soaking(args.model, args.device, args.seed, load_format=args.load_format) as soak:
        summary = soak.run(args.seconds)
        print(summary)
        check(summary)


if __name__ == "__main__":
    main()
