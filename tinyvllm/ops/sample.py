"""Sampling: greedy, or from the softmax by the Gumbel-max trick with counter-based noise."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params
from tinyvllm.ops.token_filter import smallest_left
from tinyvllm.util import DType, ceil_div

SAMPLE = Kernel(
    "sample.cu",
    "sample_kernel",
    "ptr logits, ptr sample_slots, ptr sample_positions, ptr row_params, ptr tokens, i32 vocab",
    pdl=True,
)
SHARED_BYTES = 9168  # of the struct Shared in row_part.cuh; logits follow
# Up to as many rows a cluster shares out each: from there on, blocks that deal with a row of their
# own are faster (docs/decode.md has the times).
MAX_CLUSTER_ROWS = 32
TILES = 4  # in shared memory at a time, where a block's logits don't all fit
PHILOX_ROUNDS = 7  # as philox.cuh has it


class Sample(OpDef):
    """The next token of each row.

    Temperature 0: the largest logit, the lowest index among equal ones. Else a draw from
    softmax(logits / temperature), which depends on the row's seed and the token's position only;
    with `filtered`, of the tokens that the row's min_p, top_k and top_p leave (token_filter.py).
    Never chosen: a NaN; if there is nothing else the token is 0, as it is for a row with slot -1.
    """

    name = "sample"
    reads = {
        "logits": ("S", "V"),
        "sample_slots": ("S",),
        "sample_positions": ("S",),
        "row_params": ("SLOTS", ROW_WORDS),
    }
    writes = {"tokens": ("S",)}
    attrs = frozenset({"filtered"})
    out_dtypes = {"tokens": DType.I32}

    def reference(self, a: Operands) -> None:
        params = as_row_params(a.row_params)
        for s, slot in enumerate(a.sample_slots):
            if slot < 0:
                a.tokens[s] = 0
                continue
            row, temperature = a.logits[s], params["temperature"][slot]
            allowed = row >= smallest_left(row, params[slot]) if a.filtered else None
            if temperature > 0:
                # Scaling the noise, not the logits, is the same and can't overflow.
                noise = gumbel_noise(params["seed"][slot], int(a.sample_positions[s]), row.size)
                noise *= temperature
                noise += row
                row = noise
            if allowed is not None:
                row = np.where(allowed, row, np.float32(np.nan))
            token = int(np.argmax(row))
            if np.isnan(row[token]):  # argmax prefers NaN
                numbers = np.flatnonzero(~np.isnan(row))
                token = int(numbers[np.argmax(row[numbers])]) if numbers.size else 0
            a.tokens[s] = token

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        assert a.logits.contiguous
        S, V = a.logits.shape
        if S == 0:
            return []
        threads, cluster, tiles = shape(S, V, device)
        aligned = V % 4 == 0 and a.logits.ptr % 16 == 0
        return [
            SAMPLE(aligned, a.filtered, threads, cluster, tiles).launch(
                (cluster, S),
                threads,
                smem=shared_bytes(V, threads, cluster, tiles),
                cluster=cluster,
                logits=a.logits.ptr,
                sample_slots=a.sample_slots.ptr,
                sample_positions=a.sample_positions.ptr,
                row_params=a.row_params.ptr,
                tokens=a.tokens.ptr,
                vocab=V,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        return Cost(nbytes(a.logits, a.tokens))


def shape(rows: int, vocab: int, device: DeviceInfo) -> tuple[int, int, int]:
    """How each row is dealt with: threads of a block, blocks of its cluster, and tiles of four
    logits a thread that are in shared memory at a time, or 0 for all. No token depends on it."""
    if device.compute_capability >= (9, 0) and rows <= MAX_CLUSTER_ROWS:
        staged = shared_bytes(vocab, 256, 8, 0) <= device.smem_per_block
        return 256, 8, 0 if staged else TILES
    return 1024 if rows <= device.num_sms else 512, 1, TILES


def shared_bytes(vocab: int, threads: int, cluster: int, tiles: int) -> int:
    """Shared memory of a block with such a share of a row."""
    return SHARED_BYTES + 16 * threads * (tiles or ceil_div(vocab, 4 * threads * cluster))


def gumbel_noise(seed: np.ndarray, position: int, count: int) -> np.ndarray:
    """float32 Gumbel noise for the first `count` tokens of the vocabulary at one position.

    `seed` is uint32[2]: low and high word. cuda_src/sample.cu and philox.cuh state the rule.
    """
    counter = np.zeros((4, ceil_div(count, 4)), np.uint32)
    counter[0] = np.arange(counter.shape[1])
    counter[1] = position
    words = philox4x32(counter, seed).T.reshape(-1)[:count]
    w: np.ndarray = words.astype(np.float32)
    w += np.float32(0.5)
    w *= np.float32(2**-32)
    np.minimum(w, np.float32(1 - 2**-24), out=w)
    np.negative(w, out=w)
    np.log1p(w, out=w)
    np.negative(w, out=w)
    np.log(w, out=w)
    np.negative(w, out=w)
    return w


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-7: four random words [4, n] for n 128-bit counters [4, n] and a key [2].

    All uint32, low words first (Salmon et al., SC 2011).
    """
    x0, x1, x2, x3 = counter
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(PHILOX_ROUNDS):
        p0 = np.multiply(x0, 0xD2511F53, dtype=np.uint64)
        p1 = np.multiply(x2, 0xCD9E8D57, dtype=np.uint64)
        high0, high1 = (p0 >> 32).astype(np.uint32), (p1 >> 32).astype(np.uint32)
        x0, x1 = high1 ^ x1 ^ np.uint32(k0), p1.astype(np.uint32)
        x2, x3 = high0 ^ x3 ^ np.uint32(k1), p0.astype(np.uint32)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3])
