"""Another library's kernels beside ours, by a Python file that whoever measures names."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from tinyvllm.memory.array import DeviceArray
from tinyvllm.util import InputError

Seconds = Callable[[], float]


class Rival(Protocol):
    """What `open_rival(index)` of such a file returns: `tests/bench/torch_rival.py` is one.

    It runs in the GPU's primary context. What it returns measures one of `count` runs that follow
    each other, with so many replays.
    """

    def products(self, x: DeviceArray, weights: Sequence[DeviceArray], replays: int) -> Seconds:
        """Time of one x weight^T, when those of all weights follow each other."""

    def attention(
        self,
        q: DeviceArray,
        kv_cache: DeviceArray,
        block_tables: DeviceArray,
        length: int,
        count: int,
        replays: int,
    ) -> Seconds:
        """Time of causal attention of prompts of `length` tokens, one layer of a paged cache."""


def load_rival(path: str, index: int) -> Rival:
    """The rival that a file has for GPU number `index`; InputError if it has none."""
    try:
        spec = importlib.util.spec_from_file_location("rival", path)
        if spec is None or spec.loader is None:
            raise InputError(f"--rival {path}: must be a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        rival: Rival = module.open_rival(index)
    except (ImportError, OSError, AttributeError) as error:
        raise InputError(f"--rival {path}: {error}") from error
    return rival


def in_turns(runs: Sequence[Seconds], rounds: int) -> list[float]:
    """The median of each of several times, taken in turns: the card's clock depends on its past."""
    times = [[run() for run in runs] for _ in range(rounds)]
    return [statistics.median(of_one) for of_one in zip(*times, strict=True)]
