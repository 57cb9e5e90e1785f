"""Sampling: the generator by its known answers, the noise and the draws by their mathematics."""

import numpy as np
import pytest
from harness import run_cuda, run_numpy
from test_attention import constants
from test_token_filter import SETTINGS, left_by_sorting, random_logits

from tinyvllm.driver.devices import DEVICES
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops import sample as sample_op
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params, as_words, new_row_params
from tinyvllm.ops.sample import PHILOX_ROUNDS, SHARED_BYTES, gumbel_noise, philox4x32, shape
from tinyvllm.ops.token_filter import smallest_left
from tinyvllm.util import DType


def program(V: int, filtered: bool = False) -> Program:
    p = Program("t")
    p.buffer("logits", ("S", V), DType.F32, INPUT)
    p.buffer("sample_slots", ("S",), DType.I32, INPUT)
    p.buffer("sample_positions", ("S",), DType.I32, INPUT)
    p.buffer("row_params", ("SLOTS", ROW_WORDS), DType.I32, STATE)
    names = ["logits", "sample_slots", "sample_positions", "row_params"]
    p.emit("sample", "tokens", **{n: n for n in names}, filtered=filtered, out_kind=OUTPUT)
    return p


def case(logits: np.ndarray, settings, seed: int = 0, padding=()):
    """(dims, arrays); the rows use slots in another order, with random seeds and positions.

    Row s has settings[s % len]: a temperature, or that with top_k, top_p and min_p. Rows in
    `padding` have slot -1.
    """
    rng = np.random.default_rng(seed)
    S, slots = len(logits), len(logits) + 2
    sample_slots = rng.permutation(slots)[:S].astype(np.int32)
    rows = new_row_params(slots)
    rows["temperature"] = np.nan
    for s, slot in enumerate(sample_slots):
        chosen = np.atleast_1d(settings[s % len(settings)])
        for name, value in zip(("temperature", "top_k", "top_p", "min_p"), chosen, strict=False):
            rows[name][slot] = value
    rows["seed"] = rng.integers(0, 2**32, (slots, 2))
    sample_slots[list(padding)] = -1
    return {"S": S, "SLOTS": slots}, {
        "logits": logits.astype(np.float32),
        "sample_slots": sample_slots,
        "sample_positions": rng.integers(0, 100_000, S).astype(np.int32),
        "row_params": as_words(rows),
    }


def sample(logits: np.ndarray, temperature: float, seed: int = 0) -> list[int]:
    dims, arrays = case(logits, [temperature], seed)
    return run_numpy(program(logits.shape[1]), dims, arrays)["tokens"].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # from the authors' Random123 library
        ([0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    assert constants("include/philox.cuh") == {"kPhiloxRounds": PHILOX_ROUNDS}
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


@pytest.mark.parametrize(
    ("settings", "left"),
    [((0.8, 3, 1.0, 0.0), 3), ((1.5, 0, 0.6, 0.0), None), ((1.0, 0, 1.0, 0.2), None)],
)
def test_draws_follow_the_softmax_of_what_is_left(settings, left):
    logits = np.array([0.0, 1.0, -1.0, 2.0, 1.5, -3.0])
    dims, arrays = case(np.tile(logits, (4000, 1)), [settings])
    draws = run_numpy(program(6, filtered=True), dims, arrays)["tokens"]
    kept, margin = left_by_sorting(logits.astype(np.float32), *settings)
    assert margin > 1e-3 and (left is None or len(kept) == left) and 1 < len(kept) < 6
    index = sorted(kept)
    weights = np.exp(logits[index] / settings[0])
    expected = weights / weights.sum() * len(draws)
    counts = np.bincount(draws, minlength=6)
    assert counts.sum() == counts[index].sum(), "nothing else is drawn"
    chi2 = ((counts[index] - expected) ** 2 / expected).sum()
    assert chi2 < 18.5  # 4 degrees of freedom at the most: once in a thousand seeds


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


@pytest.mark.parametrize(
    ("arch", "rows", "vocab", "expected"),
    [
        ("sm_90a", 1, 49153, (256, 8, 0)),
        ("sm_90a", 32, 128256, (256, 8, 0)),
        ("sm_90a", 32, 1 << 20, (256, 8, 4)),  # 512 KiB a block
        ("sm_90a", 33, 128256, (1024, 1, 4)),
        ("sm_90a", 132, 128256, (1024, 1, 4)),
        ("sm_90a", 133, 128256, (512, 1, 4)),
        ("sm_80", 1, 1000, (1024, 1, 4)),  # has no clusters
        ("sm_80", 109, 1000, (512, 1, 4)),
        ("sm_120", 3, 49153, (256, 8, 0)),
        ("sm_120", 3, 262144, (256, 8, 4)),  # 99 KiB a block
    ],
)
def test_how_a_row_is_shared_out(arch, rows, vocab, expected):
    assert shape(rows, vocab, DEVICES[arch]) == expected
    i32 = DeviceArray(0, (rows,), DType.I32)
    operands = Operands(
        logits=DeviceArray(0, (rows, vocab), DType.F32),
        sample_slots=i32,
        sample_positions=i32,
        row_params=i32,
        tokens=i32,
        filtered=True,
    )
    (launch,) = op_def("sample").launches(operands, DEVICES[arch])
    threads, blocks, tiles = expected
    assert launch.grid == (blocks, rows, 1)
    assert (launch.block, launch.cluster, launch.args[-1]) == (threads, blocks, vocab)
    aligned = "true" if vocab % 4 == 0 else "false"
    assert launch.spec.template_args == (aligned, "true", *map(str, expected))
    held = tiles * 4 * threads or -(-vocab // (4 * threads * blocks)) * 4 * threads
    assert launch.smem == SHARED_BYTES + 4 * held <= DEVICES[arch].smem_per_block


def test_no_rows_launch_nothing():
    empty = Operands(logits=DeviceArray(0, (0, 8), DType.F32))
    assert op_def("sample").launches(empty, DEVICES["sm_90a"]) == []


def race(arrays, s, filtered):
    """What a row's tokens race with, in float32: -inf for those that may not win."""
    params = as_row_params(arrays["row_params"])[arrays["sample_slots"][s]]
    row = arrays["logits"][s]
    left = row >= (smallest_left(row, params) if filtered else -np.inf)
    if params["temperature"] > 0:
        position = int(arrays["sample_positions"][s])
        row = row + params["temperature"] * gumbel_noise(params["seed"], position, row.size)
    return np.where(left, row, -np.inf), params["temperature"]


def check_tokens(arrays, tokens, filtered=False) -> int:
    """Compares the tokens with the reference, except where logarithms that differ in their last
    bits may decide; returns how many rows were compared."""
    compared = 0
    for s, slot in enumerate(arrays["sample_slots"]):
        if slot < 0:
            assert tokens[s] == 0
            continue
        row, temperature = race(arrays, s, filtered)
        best = np.sort(row)[-2:]
        if best[-1] == -np.inf:
            assert tokens[s] == 0
        elif temperature == 0 or best[-1] - best[0] > 1e-3 * max(1, temperature) or row.size == 1:
            assert tokens[s] == row.argmax(), (s, as_row_params(arrays["row_params"])[slot])
            compared += 1
    return compared


# As ops/sample.py chooses them: threads, blocks of a cluster, tiles in shared memory or 0 for all.
SHAPES = [(256, 8, 0), (256, 8, 4), (1024, 1, 4), (512, 1, 4)]


def use_shape(monkeypatch, chosen):
    monkeypatch.setattr(sample_op, "shape", lambda rows, vocab, device: chosen)


@pytest.fixture(params=SHAPES, ids=lambda chosen: "x".join(map(str, chosen)))
def each_shape(request, device, monkeypatch):
    if request.param[1] > 1 and device.info.compute_capability < (9, 0):
        pytest.skip("this GPU has no clusters")
    use_shape(monkeypatch, request.param)


@pytest.mark.gpu
@pytest.mark.usefixtures("each_shape")
@pytest.mark.parametrize(("S", "V"), [(1, 1), (3, 7), (5, 2048), (17, 49153), (12, 128256)])
def test_kernel(device, S, V):
    logits = np.random.default_rng(V).standard_normal((S, V), np.float32) * 3
    dims, arrays = case(logits, [0.0, 1.0, 0.3, 5.0])
    got = run_cuda(device, program(V), dims, arrays, limits={"S": S + 3})["tokens"]
    again = run_cuda(device, program(V), dims, arrays)["tokens"]
    np.testing.assert_array_equal(got, again)
    assert check_tokens(arrays, got) > S / 2


@pytest.mark.gpu
@pytest.mark.usefixtures("each_shape")
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("columns", [9, 4096 + 12])
def test_kernel_on_special_values(device, columns, filtered):
    rows, tokens = special_rows()
    wide = np.full((len(rows), columns), np.nan)
    wide[:, :9] = rows
    dims, arrays = case(wide, [0.0])
    got = run_cuda(device, program(columns, filtered), dims, arrays)["tokens"]
    assert got.tolist() == tokens


@pytest.mark.gpu
@pytest.mark.usefixtures("each_shape")
@pytest.mark.parametrize("V", [1, 17, 4100, 49153, 128256])
def test_filtered_kernel(device, V):
    S = len(SETTINGS) * (1 if V > 5000 else 3)
    dims, arrays = case(random_logits(S, V, seed=V), SETTINGS, padding=(2, 5))
    got = run_cuda(device, program(V, filtered=True), dims, arrays, limits={"S": S + 3})["tokens"]
    assert check_tokens(arrays, got, filtered=True) > S / 2


@pytest.mark.gpu
@pytest.mark.usefixtures("each_shape")
@pytest.mark.parametrize(
    "settings",
    [
        (8.0, 6, 1.0, 0.0),  # temperature, top_k, top_p, min_p
        (8.0, 0, 0.006, 0.0),
        (8.0, 0, 1.0, 0.75),
        (8.0, 30, 0.3, 0.5),
        (8.0, 2100, 0.006, 0.0),  # more than are kept aside
    ],
)
def test_kernel_draws_all_that_is_left_and_nothing_else(device, settings):
    """At a high temperature, so that few draws hit each token that is left, the last one too."""
    logits = np.random.default_rng(3).standard_normal(2500).astype(np.float32) * 2
    kept, margin = left_by_sorting(logits, *settings)
    assert margin > 1e-6 and 4 < len(kept) < 40
    dims, arrays = case(np.tile(logits, (600, 1)), [settings])
    draws = run_cuda(device, program(2500, filtered=True), dims, arrays)["tokens"]
    assert set(draws.tolist()) == kept


@pytest.mark.gpu
@pytest.mark.usefixtures("each_shape")
@pytest.mark.parametrize(
    "settings", [(1.0, 50, 0.9, 0.01), (1e-38, 0, 0.5, 0.0), (9.0, 3000, 0.5, 0.5)]
)
def test_filtered_kernel_on_flat_and_steep_rows(device, settings):
    V = 49153
    rows = np.zeros((7, V))
    rows[1] = np.linspace(-40, 40, V)
    rows[2, 77] = 1e30
    rows[3] = -np.inf
    rows[4] = np.nan
    rows[5] = np.nan
    rows[5, V - 1] = -3.4e38
    rows[6] = np.arange(V) % 7  # more equal ones than are kept aside
    dims, arrays = case(rows, [settings])
    got = run_cuda(device, program(V, filtered=True), dims, arrays)["tokens"]
    assert got[[2, 3, 4, 5]].tolist() == [77, 0, 0, V - 1]
    assert check_tokens(arrays, got, filtered=True) >= 3


@pytest.mark.gpu
@pytest.mark.usefixtures("each_shape")
def test_kernel_at_tiny_temperatures(device):
    logits = np.tile(np.array([3.0, -2.0, 2.99, np.nan, -np.inf]), (40, 1))
    for scale, temperature in ((1, 1e-38), (1e38, 1e-30)):
        dims, arrays = case(logits * scale, [temperature])
        assert set(run_cuda(device, program(5), dims, arrays)["tokens"].tolist()) == {0}


@pytest.mark.gpu
def test_all_shapes_draw_the_same_tokens(device, monkeypatch):
    """All, also where logarithms decide that differ from the reference's in their last bits."""
    dims, arrays = case(random_logits(4 * len(SETTINGS), 20001, seed=11), SETTINGS)
    tokens = []
    for chosen in SHAPES:
        if chosen[1] == 1 or device.info.compute_capability >= (9, 0):
            use_shape(monkeypatch, chosen)
            tokens.append(run_cuda(device, program(20001, filtered=True), dims, arrays)["tokens"])
    assert len(set(tokens[0].tolist())) > 4
    for other in tokens[1:]:
        np.testing.assert_array_equal(other, tokens[0])
