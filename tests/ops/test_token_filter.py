"""min_p, top_k and top_p: the sets by a sort in float64, and the integer weights."""

import re

import numpy as np
import pytest

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.ops.row_params import new_row_params
from tinyvllm.ops.token_filter import (
    LEAST,
    SLOPE,
    WEIGHT_BITS,
    integer_weights,
    power_of_two,
    smallest_left,
)

SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (2.0, 0, 1.0, 0.05),
    (0.0, 5, 0.5, 0.3),
    (1.3, 40, 0.8, 0.01),
    (0.3, 1, 0.5, 0.0),
    (1.0, 2**31 - 1, 0.999, 1e-6),
    (100.0, 0, 0.01, 0.0),
    (1.0, 0, 1e-30, 0.0),
    (5.0, 3, 1.0, 1.0),
]


def left_by_sorting(logits, temperature, top_k, top_p, min_p):
    """The set of tokens left and how far (in log-probability or weight) a threshold is from the
    next decision: the definition in float64, by a sort."""
    x = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -np.inf]
    margin = np.inf
    if temperature == 0 or not order.size:
        return set(range(len(x))), margin
    weight = np.exp((x[order] - x[order[0]]) / np.float64(np.float32(temperature)))
    if min_p > 0:
        margin = min(margin, np.abs(weight / np.float32(min_p) - 1).min() if min_p < 1 else 1)
        keep = weight >= np.float32(min_p)
        order, weight = order[keep], weight[keep]
    if 0 < top_k < len(order):
        keep = x[order] >= x[order[top_k - 1]]
        order, weight = order[keep], weight[keep]
    if top_p < 1:
        mass = np.cumsum(weight) / weight.sum()
        margin = min(margin, np.abs(mass - np.float32(top_p)).min())
        last = order[min(np.searchsorted(mass, np.float32(top_p)), len(order) - 1)]
        order = order[x[order] >= x[last]]
    return set(order.tolist()), margin


def random_logits(S, V, seed=0):
    """Rows of different spreads; some repeat values, some hold NaN and infinities."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((S, V)) * rng.choice([0.3, 2, 8], (S, 1)) + rng.choice([-9, 0, 4])
    logits[2::5] = np.round(logits[2::5] * 2) / 2
    if V > 2:
        logits[3::5, rng.integers(0, V, 3)] = np.nan
        logits[4::5, rng.integers(0, V, 3)] = -np.inf
    return logits.astype(np.float32)


def row_of(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.void:
    rows = new_row_params(1)
    rows[["temperature", "top_k", "top_p", "min_p"]] = (temperature, top_k, top_p, min_p)
    return rows[0]


@pytest.mark.parametrize("V", [1, 17, 1000])
def test_sets_are_those_of_a_sort(V):
    """Except where a threshold is closer than the weights' precision: either may decide that."""
    S, compared = 3 * len(SETTINGS), 0
    for s, logits in enumerate(random_logits(S, V)):
        settings = SETTINGS[s % len(SETTINGS)]
        want, margin = left_by_sorting(logits, *settings)
        if margin > 1e-5:
            lowest = smallest_left(logits, row_of(*settings))
            got = set(np.flatnonzero(logits >= lowest).tolist())
            everything = lowest == -np.inf
            assert everything or got == want, (s, settings)
            assert not everything or len(want) >= (logits > -np.inf).sum(), (s, settings)
            compared += 1
    assert compared > S / 2


def min_logit(row, **settings):
    return smallest_left(np.array(row, np.float32), row_of(**settings))


def test_the_order_is_min_p_then_top_k_then_top_p():
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert min_logit(row, top_k=3) == np.float32(row[2])
    # Of the three that are left, the first two have 7/9 of the probability.
    assert min_logit(row, top_p=0.77, top_k=3) == np.float32(row[1])
    assert min_logit(row, top_p=0.79, top_k=3) == np.float32(row[2])
    # min_p first: with 0.4 and 0.3 left, the first has 4/7.
    assert min_logit(row, top_p=0.56, min_p=0.7) == np.float32(row[0])
    assert min_logit(row, top_p=0.58, min_p=0.7) == np.float32(row[1])


def test_ties_stay_and_the_best_always_stays():
    row = [1.0, 3.0, 3.0, 3.0, 0.0, -0.0]
    assert min_logit(row, top_k=1) == 3
    assert min_logit(row, top_p=0.01) == 3
    assert min_logit(row, top_k=5) == 0
    assert min_logit(row, top_p=1e-38) == 3
    assert min_logit(row, min_p=1.0) == 3
    assert min_logit([1e-38, np.inf, 3.4e38], top_p=0.5, temperature=1e-38) == np.inf


def test_rows_without_filters_or_numbers_are_left_alone():
    row = [1.0, 2.0, np.nan, -np.inf]
    for settings in ({}, {"temperature": 0, "top_k": 1}, {"top_k": 2}, {"top_k": 9}):
        assert min_logit(row, **settings) == -np.inf
    assert min_logit([np.nan, -np.inf, -np.inf], top_k=1, top_p=0.5, min_p=0.1) == -np.inf


@pytest.mark.parametrize("temperature", [0.01, 1.0, 7.0])
def test_integer_weights_are_exponentials(temperature):
    logits = -np.random.default_rng(0).exponential(5, 5000).astype(np.float32)
    weights = integer_weights(logits, np.float32(temperature)).astype(np.float64)
    x = (logits.astype(np.float64) - logits.max()) / np.float64(np.float32(temperature))
    exact = np.exp(x) * 2.0**WEIGHT_BITS
    # The grid of exponents and the polynomial; then float32's error of large exponents; one unit.
    assert (np.abs(weights - exact) <= exact * (7e-7 - 3e-7 * x) + 2).all()
    assert weights.max() == 2**WEIGHT_BITS


def test_a_larger_logit_never_weighs_less():
    """On the whole grid of exponents within an octave, and from one octave to the next."""
    grid = (np.arange(-(2**19), 2**19 + 1) / 2**20).astype(np.float32)
    power = power_of_two(grid).astype(np.int64)
    assert (np.diff(power) > 0).all() and power[2**19] == 2**22
    assert power[-1] <= 2 * power[0]
    for temperature in (0.37, 1.0, 40.0):
        logits = np.sort(np.random.default_rng(1).standard_normal(20_000).astype(np.float32) * 9)
        weights = integer_weights(logits, np.float32(temperature)).astype(np.int64)
        assert (np.diff(weights) >= 0).all()
    assert not integer_weights(np.array([0, -1e9, -np.inf], np.float32), np.float32(1))[1:].any()


def test_constants_are_those_of_the_kernel():
    text = (cuda_src_dir() / "include" / "token_weight.cuh").read_text()
    found = re.findall(r"slope = (?:__fmaf_rn\(slope, part, )?([\d.e+-]+)f", text)
    np.testing.assert_array_equal(np.array(found, np.float32), SLOPE[::-1])
    assert np.float32(re.search(r"__fdiv_rn\(([\d.]+)f", text).group(1)) == np.float32(
        np.log2(np.e)
    )
    assert f"{LEAST:.1f}f" in text
