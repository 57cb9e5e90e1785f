"""Paged KV caches in which everything that no row may read is poison."""

from __future__ import annotations

import numpy as np

from tinyvllm.util import ceil_div

LAYERS, LAYER = 2, 1  # of the cache; the one that is filled
GROUP = 1  # the KV group whose tables are filled, the other one's being poison


def paged_cache(
    rng: np.random.Generator,
    lengths: list[int],
    filled: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> dict[str, np.ndarray]:
    """A cache, tables and slots for rows that get blocks for `lengths` tokens.

    The first `filled` of these hold random keys and values. The rest of the cache is NaN, and
    block ids are far out of range where a table goes on.
    """
    needed = [ceil_div(n, block_size) for n in lengths]
    slots = rng.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32)
    ids = rng.permutation(sum(needed) + 3).astype(np.int32)
    tables = np.full((2, len(lengths) + 2, max(needed) + 1), 1 << 30, np.int32)
    cache = np.full((len(ids), LAYERS, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
    for r, (slot, count) in enumerate(zip(slots, filled, strict=True)):
        own = ids[sum(needed[:r]) : sum(needed[: r + 1])]
        tables[GROUP, slot, : len(own)] = own
        at = np.arange(count)
        kv = rng.standard_normal((count, 2, kv_heads, head_dim), np.float32)
        cache[own[at // block_size], LAYER, :, :, at % block_size] = kv
    return {"kv_cache": cache, "block_tables": tables, "batch_slots": slots}


def cache_dims(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """The sizes of such a cache and its tables, by name."""
    _, slots, blocks = arrays["block_tables"].shape
    return {"NB": len(arrays["kv_cache"]), "SLOTS": slots, "MB": blocks}
