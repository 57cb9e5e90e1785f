"""Sampling: the generator by its known answers, the noise and the draws by their mathematics."""

import numpy as np
import pytest
from harness import run_cuda, run_numpy

from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params, as_words, new_row_params
from tinyvllm.ops.sample import gumbel_noise, philox4x32
from tinyvllm.util import DType


def program(V: int, filtered: bool = False) -> Program:
    p = Program("t")
    p.buffer("logits", ("S", V), DType.F32, INPUT)
    p.buffer("sample_slots", ("S",), DType.I32, INPUT)
    p.buffer("sample_positions", ("S",), DType.I32, INPUT)
    p.buffer("row_params", ("SLOTS", ROW_WORDS), DType.I32, STATE)
    names = ["logits", "sample_slots", "sample_positions", "row_params"]
    if filtered:
        names.append(p.buffer("min_logit", ("S",), DType.F32, INPUT))
    p.emit("sample", "tokens", **{n: n for n in names}, out_kind=OUTPUT)
    return p


def case(logits: np.ndarray, temperatures, seed: int = 0):
    """(dims, arrays); the rows use slots in another order, with random seeds and positions."""
    rng = np.random.default_rng(seed)
    S, slots = len(logits), len(logits) + 2
    sample_slots = rng.permutation(slots)[:S].astype(np.int32)
    rows = new_row_params(slots)
    rows["temperature"] = np.nan
    rows["temperature"][sample_slots] = temperatures
    rows["seed"] = rng.integers(0, 2**32, (slots, 2))
    return {"S": S, "SLOTS": slots}, {
        "logits": logits.astype(np.float32),
        "sample_slots": sample_slots,
        "sample_positions": rng.integers(0, 100_000, S).astype(np.int32),
        "row_params": as_words(rows),
    }


def sample(logits: np.ndarray, temperatures, seed: int = 0) -> list[int]:
    dims, arrays = case(logits, temperatures, seed)
    return run_numpy(program(logits.shape[1]), dims, arrays)["tokens"].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # from the authors' Random123 library
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    counters = np.array([counter, counter], np.uint32).T
    got = philox4x32(counters, np.array(key, np.uint32))
    for column in got.T:
        assert [f"{int(w):08x}" for w in column] == words.split()


def test_gumbel_noise_is_minus_log_minus_log_of_a_uniform():
    seed = np.array([7, 0xFFFFFFFF], np.uint32)
    noise = gumbel_noise(seed, 12, 1003)
    counters = np.array([[v // 4, 12, 0, 0] for v in range(1003)], np.uint32).T
    words = philox4x32(counters, seed)[np.arange(1003) % 4, np.arange(1003)]
    exact = -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2**32))
    np.testing.assert_allclose(noise, exact, rtol=1e-5, atol=1e-5)
    assert (gumbel_noise(seed, 12, 5) == noise[:5]).all()
    assert (gumbel_noise(seed, 13, 1003) != noise).mean() > 0.99


def test_gumbel_noise_is_finite_at_both_ends_of_the_words(monkeypatch):
    ends = np.array([[0], [2**32 - 1], [1], [2**31]], np.uint32)
    monkeypatch.setattr("tinyvllm.ops.sample.philox4x32", lambda counter, key: ends)
    noise = gumbel_noise(np.zeros(2, np.uint32), 0, 4)
    assert np.isfinite(noise).all()
    # A word of 0 is the smallest exponential, 2^-33, and so the largest noise.
    np.testing.assert_allclose(noise[[0, 3]], [33 * np.log(2), -np.log(np.log(2))], rtol=1e-6)
    assert noise.argmin() == 1 and noise.argmax() == 0


def special_rows() -> tuple[np.ndarray, list[int]]:
    """Rows of 9 logits and their greedy tokens."""
    nan, inf = np.nan, np.inf
    rows = np.zeros((7, 9))
    rows[0, 5] = 1
    rows[1, [3, 8]] = 2  # lowest index among equals
    rows[2, [0, 4]] = nan, 1
    rows[3] = -inf
    rows[4] = nan  # nothing else
    rows[5] = [nan] * 8 + [-inf]
    rows[6, 7] = inf
    return rows, [5, 3, 4, 0, 0, 8, 7]


def test_greedy():
    rows, tokens = special_rows()
    assert sample(rows, 0.0) == tokens


def test_draws_follow_the_softmax():
    logits, temperature = np.array([0.0, 1.0, -1.0, 2.0, np.nan, -np.inf]), 0.7
    draws = sample(np.tile(logits, (3000, 1)), temperature)
    weights = np.where(np.isfinite(logits), np.exp(logits / temperature), 0)
    expected = weights / weights.sum() * len(draws)
    counts = np.bincount(draws, minlength=6)
    assert counts[4] == counts[5] == 0
    chi2 = ((counts[:4] - expected[:4]) ** 2 / expected[:4]).sum()
    assert chi2 < 16.3  # 3 degrees of freedom: exceeded once in a thousand seeds


def test_tiny_and_huge_temperatures_overflow_nothing():
    logits = np.tile(np.array([3.0, -2.0, 2.99, np.nan, -np.inf]), (400, 1))
    assert set(sample(logits, 1e-38)) == {0}, "greedy in the limit"
    assert set(sample(logits * 1e38, 1e-30)) == {0}
    assert set(sample(logits, 1e6)) == {0, 1, 2}, "uniform in the limit"


def filtered_case(V: int):
    """Four rows of V logits, of which 3, 1, all and none are allowed; two rows are padding."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((6, V))
    dims, arrays = case(logits, 1.0)
    arrays["sample_slots"][[1, 4]] = -1
    sorted_logits = np.sort(arrays["logits"], axis=1)
    arrays["min_logit"] = np.array([-np.inf] * 6, np.float32)
    arrays["min_logit"][0] = sorted_logits[0, -min(3, V)]
    arrays["min_logit"][2] = sorted_logits[2, -1]
    arrays["min_logit"][5] = np.inf
    return dims, arrays


def check_filtered(arrays, tokens) -> None:
    logits = arrays["logits"]
    assert tokens[[1, 4, 5]].tolist() == [0, 0, 0]
    assert logits[0, tokens[0]] >= arrays["min_logit"][0]
    assert tokens[2] == logits[2].argmax()


def test_logits_below_the_smallest_allowed_are_never_chosen():
    dims, arrays = filtered_case(40)
    chosen = set()
    for position in range(200):
        arrays["sample_positions"][:] = position
        tokens = run_numpy(program(40, filtered=True), dims, arrays)["tokens"]
        check_filtered(arrays, tokens)
        chosen.add(int(tokens[0]))
    assert len(chosen) == 3


def test_a_row_draws_the_same_token_in_any_batch():
    rng = np.random.default_rng(3)
    dims, arrays = case(rng.standard_normal((6, 301)), [1.0, 0.0, 0.5, 2.0, 1.0, 0.0])
    together = run_numpy(program(301), dims, arrays)["tokens"]
    for s in range(6):
        one = {
            **arrays,
            **{n: arrays[n][s : s + 1] for n in ("logits", "sample_slots", "sample_positions")},
        }
        assert run_numpy(program(301), {**dims, "S": 1}, one)["tokens"] == together[s : s + 1]


def test_scratch_holds_a_candidate_for_every_chunk():
    def operands(S, V):
        i32 = DeviceArray(0, (S,), DType.I32)
        return Operands(
            logits=DeviceArray(0, (S, V), DType.F32),
            sample_slots=i32,
            sample_positions=i32,
            row_params=i32,
            min_logit=None,
            tokens=i32,
            scratch=64,
        )

    op = op_def("sample")
    chunk, merge = op.launches(operands(3, 49153), None)
    assert chunk.grid == (25, 3, 1) and merge.grid == (3, 1, 1)
    assert op.scratch(operands(3, 49153), None) == 3 * 25 * 8
    assert chunk.spec.template_args == ("false", "false")  # 49153 is odd: rows are not aligned
    assert op.launches(operands(0, 49153), None) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("S", "V"), [(1, 1), (3, 7), (5, 2048), (17, 49153), (4, 128256)])
def test_kernel(device, S, V):
    rng = np.random.default_rng(V)
    logits = rng.standard_normal((S, V), np.float32) * 3
    temperatures = np.array([0.0, 1.0, 0.3, 5.0])[np.arange(S) % 4]
    dims, arrays = case(logits, temperatures)
    want = run_numpy(program(V), dims, arrays)["tokens"]
    got = run_cuda(device, program(V), dims, arrays, limits={"S": S + 3})["tokens"]
    again = run_cuda(device, program(V), dims, arrays)["tokens"]
    np.testing.assert_array_equal(got, again)
    compared = 0
    for s, slot in enumerate(arrays["sample_slots"]):
        row = logits[s]
        if temperatures[s] > 0:  # logarithms may differ in their last bits
            params = as_row_params(arrays["row_params"])[slot]
            noise = gumbel_noise(params["seed"], int(arrays["sample_positions"][s]), V)
            row = row + params["temperature"] * noise
        best = np.sort(row)[-2:]
        if temperatures[s] == 0 or V == 1 or best[1] - best[0] > 1e-3 * max(1, temperatures[s]):
            assert got[s] == want[s], (s, temperatures[s])
            compared += 1
    assert compared > S / 2


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [9, 4096 + 12])
def test_kernel_on_special_values(device, columns):
    rows, tokens = special_rows()
    wide = np.full((len(rows), columns), np.nan)
    wide[:, :9] = rows
    dims, arrays = case(wide, 0.0)
    assert run_cuda(device, program(columns), dims, arrays)["tokens"].tolist() == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1, 17, 4099, 8192])
def test_kernel_with_a_smallest_logit(device, V):
    dims, arrays = filtered_case(V)
    want = run_numpy(program(V, filtered=True), dims, arrays)["tokens"]
    got = run_cuda(device, program(V, filtered=True), dims, arrays, limits={"S": 9})["tokens"]
    check_filtered(arrays, got)
    np.testing.assert_array_equal(got, want)  # the best two are far apart for this seed


@pytest.mark.gpu
def test_kernel_at_tiny_temperatures(device):
    logits = np.tile(np.array([3.0, -2.0, 2.99, np.nan, -np.inf]), (40, 1))
    for scale, temperature in ((1, 1e-38), (1e38, 1e-30)):
        dims, arrays = case(logits * scale, temperature)
        assert set(run_cuda(device, program(5), dims, arrays)["tokens"].tolist()) == {0}
