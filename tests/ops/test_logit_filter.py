"""min_p, top_k and top_p: the sets by a sort in float64, the integer weights, the distribution."""

import re

import numpy as np
import pytest
from harness import run_cuda, run_numpy

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.ops.logit_filter import POLYNOMIAL, THREADS, WEIGHT_BITS, integer_weights
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params, as_words, new_row_params
from tinyvllm.util import DType

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


def program(V: int) -> Program:
    """Filter, then a token by what it left."""
    p = Program("t")
    p.buffer("logits", ("S", V), DType.F32, INPUT)
    p.buffer("sample_slots", ("S",), DType.I32, INPUT)
    p.buffer("sample_positions", ("S",), DType.I32, INPUT)
    p.buffer("row_params", ("SLOTS", ROW_WORDS), DType.I32, STATE)
    rows = {n: n for n in ("logits", "sample_slots", "row_params")}
    p.emit("filter_logits", "min_logit", **rows, out_kind=OUTPUT)
    p.emit(
        "sample",
        "tokens",
        **rows,
        sample_positions="sample_positions",
        min_logit="min_logit",
        out_kind=OUTPUT,
    )
    return p


def case(logits: np.ndarray, settings, padding=()):
    """(dims, arrays) with settings[s % len] for row s; rows in `padding` have slot -1."""
    rng = np.random.default_rng(7)
    S, slots = len(logits), len(logits) + 2
    sample_slots = rng.permutation(slots)[:S].astype(np.int32)
    rows = new_row_params(slots)
    rows["seed"] = rng.integers(0, 2**32, (slots, 2))
    for s, slot in enumerate(sample_slots):
        chosen = settings[s % len(settings)]
        for name, value in zip(("temperature", "top_k", "top_p", "min_p"), chosen, strict=True):
            rows[name][slot] = value
    sample_slots[list(padding)] = -1
    return {"S": S, "SLOTS": slots}, {
        "logits": logits.astype(np.float32),
        "sample_slots": sample_slots,
        "sample_positions": np.arange(S, dtype=np.int32),
        "row_params": as_words(rows),
    }


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


def check_sets(arrays, min_logit) -> int:
    """Compares each row's set with the sorted definition; returns in how many rows that was
    possible, since a threshold closer than the weights' precision is either's to decide."""
    rows = as_row_params(arrays["row_params"])
    compared = 0
    for s, slot in enumerate(arrays["sample_slots"]):
        if slot < 0:
            assert min_logit[s] == -np.inf
            continue
        row, logits = rows[slot], arrays["logits"][s]
        names = ("temperature", "top_k", "top_p", "min_p")
        want, margin = left_by_sorting(logits, *(row[n] for n in names))
        if margin > 1e-5:
            got = set(np.flatnonzero(logits >= min_logit[s]).tolist())
            everything = min_logit[s] == -np.inf
            assert everything or got == want, (s, row)
            assert not everything or len(want) >= (logits > -np.inf).sum(), (s, row)
            compared += 1
    return compared


def random_logits(S, V, seed=0):
    """Rows of different spreads; some repeat values, some hold NaN and infinities."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((S, V)) * rng.choice([0.3, 2, 8], (S, 1)) + rng.choice([-9, 0, 4])
    logits[2::5] = np.round(logits[2::5] * 2) / 2
    if V > 2:
        logits[3::5, rng.integers(0, V, 3)] = np.nan
        logits[4::5, rng.integers(0, V, 3)] = -np.inf
    return logits


@pytest.mark.parametrize("V", [1, 17, 1000])
def test_sets_are_those_of_a_sort(V):
    S = 3 * len(SETTINGS)
    dims, arrays = case(random_logits(S, V), SETTINGS, padding=(4, S - 1))
    compared = check_sets(arrays, run_numpy(program(V), dims, arrays)["min_logit"])
    assert compared > S / 2


def min_logit(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    dims, arrays = case(np.array([row]), [(temperature, top_k, top_p, min_p)])
    return run_numpy(program(len(row)), dims, arrays)["min_logit"][0]


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
    # float32 exponents: relative errors of some 2^-24 of the exponent, and one unit.
    assert (np.abs(weights - exact) <= exact * 3e-7 * (1 - x) + 2).all()
    assert weights.max() == 2**WEIGHT_BITS
    falling = np.sort(logits)[::-1]
    steps = np.diff(integer_weights(falling, np.float32(temperature)).astype(np.float64))
    assert (steps <= 2e-7 * 2**WEIGHT_BITS).all()


def test_constants_are_those_of_the_kernel():
    text = (cuda_src_dir() / "logit_filter.cu").read_text()
    assert f"kThreads = {THREADS};" in text
    found = [np.float32(c) for c in re.findall(r"(?:power = |part\), )([\d.e+-]+)f", text)]
    np.testing.assert_array_equal(np.array(found, np.float32), POLYNOMIAL[::-1])
    assert np.float32(re.search(r"__fdiv_rn\(([\d.]+)f", text).group(1)) == np.float32(
        np.log2(np.e)
    )


@pytest.mark.parametrize(
    ("settings", "left"),
    [((0.8, 3, 1.0, 0.0), 3), ((1.5, 0, 0.6, 0.0), None), ((1.0, 0, 1.0, 0.2), None)],
)
def test_draws_follow_the_softmax_of_what_is_left(settings, left):
    logits = np.array([0.0, 1.0, -1.0, 2.0, 1.5, -3.0])
    dims, arrays = case(np.tile(logits, (4000, 1)), [settings])
    draws = run_numpy(program(6), dims, arrays)["tokens"]
    kept, margin = left_by_sorting(logits.astype(np.float32), *settings)
    assert margin > 1e-3 and (left is None or len(kept) == left) and 1 < len(kept) < 6
    index = sorted(kept)
    weights = np.exp(logits[index] / settings[0])
    expected = weights / weights.sum() * len(draws)
    counts = np.bincount(draws, minlength=6)
    assert counts.sum() == counts[index].sum(), "nothing else is drawn"
    chi2 = ((counts[index] - expected) ** 2 / expected).sum()
    assert chi2 < 18.5  # 4 degrees of freedom at the most: once in a thousand seeds


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1, 17, 4100, 49153, 128256])
@pytest.mark.parametrize("S", [1, 7, 33])
def test_kernel(device, S, V):
    """Thresholds equal to the bit, and again with the logits raised or lowered."""
    logits = random_logits(S, V, seed=V)
    padding = (2, 5) if S > 5 else ()
    for shift in range(len(SETTINGS) if S == 1 else 1):
        settings = SETTINGS[shift:] + SETTINGS[:shift]
        dims, arrays = case(logits, settings, padding)
        want = run_numpy(program(V), dims, arrays)["min_logit"]
        got = run_cuda(device, program(V), dims, arrays, limits={"S": S + 3})["min_logit"]
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_kernel_on_flat_and_steep_rows(device):
    V = 49153
    rows = np.zeros((6, V))
    rows[1] = np.linspace(-40, 40, V)
    rows[2, 77] = 1e30
    rows[3] = -np.inf
    rows[4] = np.nan
    rows[5] = np.nan
    rows[5, V - 1] = -3.4e38
    for settings in [(1.0, 50, 0.9, 0.01), (1e-38, 0, 0.5, 0.0), (1e6, 7, 1.0, 0.5)]:
        dims, arrays = case(rows, [settings])
        want = run_numpy(program(V), dims, arrays)["min_logit"]
        got = run_cuda(device, program(V), dims, arrays)["min_logit"]
        np.testing.assert_array_equal(got, want)
