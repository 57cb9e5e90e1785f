"""What min_p, top_k and top_p leave of a row's tokens: the reference of sample.cu."""

from __future__ import annotations

import math

import numpy as np

# A weight is exp((logit - best) / temperature) as an integer in units of 2^-WEIGHT_BITS, so that
# sums don't depend on their order: 2^23 weights of 1 fit 64 bits.
WEIGHT_BITS = 40
LEAST = np.float32(-42)  # of the exponent: weighs 0
MAX_SCALE = np.float32(1e30)  # of log2(e) / temperature: 0 times it must be 0
# 2^f = 1 + f (c0 + c1 f + ...) for |f| <= 1/2 to 1.2 units of 2^-22, and as good at both ends that
# the next octave continues it.
SLOPE = np.array(
    [6.931470037e-01, 2.402218282e-01, 5.550743267e-02, 9.675556794e-03, 1.327593694e-03],
    np.float32,
)


def smallest_left(logits: np.ndarray, row: np.void) -> float:
    """The smallest logit that may be chosen of a row (float32 [V]) with these ROW_PARAMS.

    min_p: of the tokens at least that likely relative to the best. top_k: of these, the k best.
    top_p: of these, a token is left if the better ones together have less than top_p of the
    probability of all that were left. Those equal to the last one stay; the best always stays.
    -inf where nothing is filtered: greedy rows, rows with all three off, rows with nothing but NaN
    and -inf.
    """
    lowest = -np.inf
    top_k, top_p, min_p = int(row["top_k"]), row["top_p"], row["min_p"]
    if row["temperature"] == 0 or (top_k == 0 and top_p >= 1 and min_p <= 0):
        return lowest
    left = logits[logits > -np.inf]  # without NaN
    if left.size == 0:
        return lowest
    if min_p > 0:
        floor = math.ceil(float(min_p) * 2.0**WEIGHT_BITS)
        lowest = float(left[integer_weights(left, row["temperature"]) >= floor].min())
        left = left[left >= lowest]
    if 0 < top_k < left.size:
        lowest = float(np.partition(left, left.size - top_k)[left.size - top_k])
        left = left[left >= lowest]
    if top_p < 1:
        left = np.sort(left)[::-1]
        weights = integer_weights(left, row["temperature"])
        sums = np.cumsum(weights)
        target = np.uint64(math.ceil(float(top_p) * float(sums[-1])))
        lowest = float(left[np.searchsorted(sums, target)])  # the first to bring it to the target
    return lowest + 0.0  # no -0


def integer_weights(logits: np.ndarray, temperature: np.float32) -> np.ndarray:
    """uint64 weights of logits (no NaN, and not all -inf); every operation rounds as in
    token_weight.cuh, so the integers are the same there. A larger logit never weighs less."""
    best = logits.max()
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf, and what becomes infinite
        scale = min(np.float32(math.log2(math.e)) / np.float32(temperature), MAX_SCALE)
        exponent = (logits - best) * scale
    exponent[logits == best] = 0
    np.maximum(exponent, LEAST, out=exponent)
    whole = np.rint(exponent)
    power = power_of_two(np.rint((exponent - whole) * np.float32(2**20)) / np.float32(2**20))
    weights: np.ndarray = power << np.uint64(WEIGHT_BITS - 22)
    weights >>= (-whole).astype(np.uint64)
    return weights


def power_of_two(part: np.ndarray) -> np.ndarray:
    """2^part in units of 2^-22 as uint64, for float32 multiples of 2^-20 within [-1/2, 1/2].

    In float64 the products and sums are exact, so each line is one fused multiply-add in float32.
    """
    part = part.astype(np.float64)
    slope = np.full(part.shape, SLOPE[-1])
    for coefficient in SLOPE[-2::-1]:
        slope = (slope * part + np.float64(coefficient)).astype(np.float32)
    shifted = (slope * part + 3.0).astype(np.float32)  # 2 + 2^part, within [2, 4)
    power: np.ndarray = shifted.view(np.uint32) - np.uint32(0x40000000)
    return power.astype(np.uint64)
