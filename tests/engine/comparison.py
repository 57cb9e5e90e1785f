"""When two outputs of one request count as the same: equal tokens, but for rounding."""

from __future__ import annotations

import numpy as np
from driving import run, tokens_of

from tinyvllm.engine.batch import request_seed
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.request import Request
from tinyvllm.ops.sample import gumbel_noise
from tinyvllm.sampling_params import MAX_SEED, SamplingParams

# How far apart, in logits, two values must be for rounding not to swap them: float32, bfloat16.
MARGIN = {"cpu": 1e-3, "cuda": 0.25}


class Comparison:
    """Compares outputs by the log-probabilities that one engine, `scorer`, gives to them."""

    def __init__(self, scorer: LLMEngine) -> None:
        self._scorer = scorer
        self._vocab = scorer.model.config.vocab_size
        self._margin = MARGIN[scorer.backend.device_name.partition(":")[0]]

    @staticmethod
    def comparable(params: SamplingParams) -> bool:
        """Whether what the sampler compares follows from log-probabilities of single tokens."""
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return params.repetition_penalty == 1 and (params.greedy or not filtered)

    def check(
        self,
        engine: LLMEngine,
        prompt: list[int],
        params: SamplingParams,
        have: list[int],
        want: list[int],
        index: int = 0,
    ) -> None:
        """Asserts that the first different tokens of two outputs have values within the margin,
        and that `engine`, put on the wanted way, goes on like this.

        index: which of the samples of a request it is.
        """
        seed = request_seed(Request("r", prompt, params, index=index), 0)
        while have != want:
            both = list(zip(have, want, strict=False))
            at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
            assert at < len(both), f"one ends where the other goes on: {have}, {want}"
            values = [self._value(prompt, params, seed, want[:at], t) for t in both[at]]
            difference = abs(values[0] - values[1])
            assert difference < self._margin, (at, both[at], values, prompt, params)
            rest = want[at + 1 :]
            ends = params.counted or params.stop or params.stop_token_ids or not params.ignore_eos
            if not rest or ends or seed > MAX_SEED:
                return  # what depends on the output cannot be continued in a prompt
            prompt, want = [*prompt, *want[: at + 1]], rest
            follow = SamplingParams(
                temperature=params.temperature,
                logit_bias=params.logit_bias,
                seed=seed,
                max_tokens=len(want),
                ignore_eos=True,
            )
            (have,) = tokens_of(run(engine, [prompt], follow))

    def _value(
        self, prompt: list[int], params: SamplingParams, seed: int, output: list[int], token: int
    ) -> float:
        """What the sampler compares, of one token after `output`."""
        context, before = [*prompt, *output], output.count(token)
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (result,) = run(self._scorer, [[*context, token]], scored)
        assert result.prompt_logprobs is not None and result.prompt_logprobs[-1] is not None
        value = result.prompt_logprobs[-1][token].logprob
        value += (params.logit_bias or {}).get(token, 0.0)
        value -= params.frequency_penalty * before + params.presence_penalty * (before > 0)
        if params.temperature > 0:
            words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
            noise = gumbel_noise(words, len(context), self._vocab)
            value += params.temperature * float(noise[token])
        return value
