"""How much of the KV cache lies unused in partly filled blocks, by the size of a block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyvllm.bench.lengths import Lengths
from tinyvllm.config import BLOCK_SIZES
from tinyvllm.util import ceil_div


@dataclass(frozen=True)
class Waste:
    """A block size: the share of allocated KV bytes without a token in them, over the time that
    the requests run, and how many requests of average final length fit."""

    block_size: int
    wasted: float
    sequences: int


def waste_by_block_size(lengths: list[Lengths], kv_bytes: int, token_bytes: int) -> list[Waste]:
    """A row for each block size, for a cache of `kv_bytes` at `token_bytes` a token.

    A request counts once for each of its steps: with all tokens of its prompt after the first,
    with one more after each further one. Blocks shared between requests are left out of account.
    """
    rows = []
    for size in BLOCK_SIZES:
        allocated = used = final = 0
        for prompt, output in lengths:
            tokens = np.arange(prompt, prompt + output, dtype=np.int64)
            allocated += int((-(-tokens // size) * size).sum())
            used += int(tokens.sum())
            final += ceil_div(prompt + output, size)
        blocks = kv_bytes // (size * token_bytes)
        rows.append(Waste(size, 1 - used / allocated, blocks * len(lengths) // final))
    return rows
