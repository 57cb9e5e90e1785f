"""The smallest logit that min_p, top_k and top_p leave to a row, found without sorting."""

from __future__ import annotations

import math

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params
from tinyvllm.util import DType

FILTER_LOGITS = Kernel(
    "logit_filter.cu",
    "filter_logits_kernel",
    "ptr logits, ptr sample_slots, ptr row_params, ptr min_logit, i32 vocab",
    pdl=True,
)
THREADS = 1024

# A weight is exp((logit - best) / temperature) as an integer in units of 2^-WEIGHT_BITS, so that
# sums don't depend on their order: weights below 2^-41 are 0, and 2^23 weights of 1 fit 64 bits.
WEIGHT_BITS = 40
MAX_SCALE = np.float32(1e30)  # of log2(e) / temperature: 0 times it must be 0
# Taylor's 2^f = sum (f ln 2)^i / i! for |f| <= 1/2, float32, lowest power first: to 2^-23.
POLYNOMIAL = np.array([math.log(2) ** i / math.factorial(i) for i in range(8)], np.float32)


class FilterLogits(OpDef):
    """The smallest logit that may be chosen for each sampled row, of the softmax with temperature.

    min_p: of the tokens at least that likely relative to the best. top_k: of these, the k best.
    top_p: of these, a token is left if the better ones together have less than top_p of the
    probability of all that were left. Those equal to the last one stay; the best always stays.
    -inf where nothing is filtered: for greedy rows, rows with all three off, padding rows (slot
    -1), and rows with nothing but NaN and -inf.
    """

    name = "filter_logits"
    reads = {
        "logits": ("S", "V"),
        "sample_slots": ("S",),
        "row_params": ("SLOTS", ROW_WORDS),
    }
    writes = {"min_logit": ("S",)}
    out_dtypes = {"min_logit": DType.F32}

    def reference(self, a: Operands) -> None:
        rows = as_row_params(a.row_params)
        for s, slot in enumerate(a.sample_slots):
            a.min_logit[s] = -np.inf if slot < 0 else smallest_left(a.logits[s], rows[slot])

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        assert a.logits.contiguous
        S, V = a.logits.shape
        if S == 0:
            return []
        return [
            FILTER_LOGITS(V % 4 == 0 and a.logits.ptr % 16 == 0).launch(
                (S,),
                THREADS,
                logits=a.logits.ptr,
                sample_slots=a.sample_slots.ptr,
                row_params=a.row_params.ptr,
                min_logit=a.min_logit.ptr,
                vocab=V,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        return Cost(nbytes(a.logits, a.min_logit))


def smallest_left(logits: np.ndarray, row: np.void) -> float:
    """The op for one row: float32 logits [V] and its ROW_PARAMS."""
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
    logit_filter.cu, so the integers are the same there."""
    best = logits.max()
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf, and what becomes infinite
        scale = min(np.float32(math.log2(math.e)) / np.float32(temperature), MAX_SCALE)
        exponent = (logits - best) * scale
    exponent[logits == best] = 0
    visible = exponent >= -WEIGHT_BITS - 1
    exponent = exponent[visible]
    whole = np.rint(exponent)
    part = exponent - whole
    power = np.full_like(part, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        power *= part
        power += coefficient
    weights = np.zeros(logits.shape, np.uint64)
    fixed = (power * np.float32(2**30)).astype(np.uint64) << np.uint64(WEIGHT_BITS - 30)
    weights[visible] = fixed >> (-whole).astype(np.uint64)
    return weights
