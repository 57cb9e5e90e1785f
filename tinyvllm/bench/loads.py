"""The loads of `tinyvllm bench throughput`: prompts, lengths of outputs, times of arrival."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tinyvllm.bench.lengths import MEAN_INPUT_LEN, MEAN_OUTPUT_LEN, Lengths
from tinyvllm.config import check_int

# The logarithms of lengths of conversations are spread by about this much. The means of `sharegpt`
# are those of the PagedAttention paper, which shows the long tails of both lengths in a figure and
# gives no spread: 1 is a choice, with a 99th percentile of 6 times the mean.
SPREAD = 1.0
MAX_SHAREGPT_LEN = 1024  # of prompts and outputs; the paper's model has a context of 2048

NUM_DECODERS = 64
LONG_PROMPT = 8192
LONG_EVERY = 0.25  # seconds


@dataclass(frozen=True)
class LoadRequest:
    """A prompt that comes `arrival` seconds after the start and gets `output_len` tokens."""

    prompt: list[int]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival. `rivals`: what others reach, in output tokens a second."""

    name: str
    requests: list[LoadRequest]
    temperature: float = 0.0
    rivals: tuple[tuple[str, float], ...] = ()

    @property
    def num_input_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, output included."""
        return max(len(request.prompt) + request.output_len for request in self.requests)


def nano_vllm(vocab_size: int, seed: int) -> Load:
    """The load that nano-vllm publishes: 256 requests, 133,966 output tokens with seed 0.

    Its prompts hold ids up to 10,000, so fewer where the vocabulary is smaller.
    """
    rng = random.Random(seed)
    largest = min(10000, vocab_size - 1)
    prompts = [[rng.randint(0, largest) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    rivals = (
        ("nano-vllm, A800, published", 15068.0),
        ("vLLM, A800, published with it", 12627.0),
    )
    requests = [LoadRequest(*pair) for pair in zip(prompts, lengths, strict=True)]
    return Load("nano-vllm", requests, 0.6, rivals)


def uniform(vocab_size: int, seed: int) -> Load:
    """512 requests, lengths in and out uniform from 100 to 1024: 288,243 output tokens, seed 0."""
    rng = np.random.RandomState(seed)
    inputs, outputs = (rng.randint(100, 1025, 512).tolist() for _ in range(2))
    requests = [
        LoadRequest(rng.randint(0, vocab_size, length).tolist(), output_len)
        for length, output_len in zip(inputs, outputs, strict=True)
    ]
    return Load("uniform", requests, rivals=(("vLLM 0.26, H200, 2026-11-29", 31000.0),))


def sharegpt(vocab_size: int, seed: int, count: int = 1024) -> Load:
    """Lengths like those of ShareGPT's conversations: log-normal, means of 161 in and 338 out."""
    check_int("requests", count, 1, None)
    rng = np.random.default_rng(seed)

    def draw(mean: float) -> list[int]:
        # A log-normal variable's mean is exp(mu + spread^2 / 2).
        lengths = rng.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, count)
        return np.ceil(lengths).clip(1, MAX_SHAREGPT_LEN).astype(int).tolist()  # type: ignore[no-any-return]

    lengths = zip(draw(MEAN_INPUT_LEN), draw(MEAN_OUTPUT_LEN), strict=True)
    return of_lengths("sharegpt", [Lengths(*pair) for pair in lengths], vocab_size, seed)


def of_lengths(name: str, lengths: Iterable[Lengths], vocab_size: int, seed: int) -> Load:
    """Random prompts of given lengths."""
    rng = np.random.default_rng(seed)
    requests = [
        LoadRequest(rng.integers(0, vocab_size, input_len).tolist(), output_len)
        for input_len, output_len in lengths
    ]
    return Load(name, requests)


def long_prompts(vocab_size: int, seed: int) -> Load:
    """64 sequences decode while a prompt of 8192 tokens comes every quarter of a second.

    What counts is the time between tokens: nobody's decoding may stop for a prompt.
    """
    rng = np.random.default_rng(seed)

    def request(input_len: int, output_len: int, arrival: float) -> LoadRequest:
        return LoadRequest(rng.integers(0, vocab_size, input_len).tolist(), output_len, arrival)

    decoders = [request(128, 1024, 0.0) for _ in range(NUM_DECODERS)]
    late = [request(LONG_PROMPT, 16, LONG_EVERY * (i + 1)) for i in range(6)]
    return Load("long-prompts", decoders + late)


# By name; each takes the size of the vocabulary and a seed.
LOADS: dict[str, Callable[[int, int], Load]] = {
    "nano-vllm": nano_vllm,
    "uniform": uniform,
    "sharegpt": sharegpt,
    "long-prompts": long_prompts,
}
