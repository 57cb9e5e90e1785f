"""The head's product with sampling: when it makes no logits, and that its tokens are the same."""

from dataclasses import replace

import numpy as np
import pytest
from harness import run_cuda, run_numpy
from test_sample import case

from tinyvllm.driver.devices import DEVICES
from tinyvllm.ops import matmul_sample
from tinyvllm.ops.executor import described, plan_program
from tinyvllm.ops.lower import RULES, fuse_norm, fuse_sample, lower
from tinyvllm.ops.matmul_kernels import MATMUL_FEW_ROWS, MATMUL_LARGE, MATMUL_WIDE
from tinyvllm.ops.matmul_sample import (
    LOGITS_ROWS,
    MATMUL_SAMPLE,
    SAMPLE_TILES,
    choose_sample,
)
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, TEMP, Program
from tinyvllm.ops.registry import op_def
from tinyvllm.ops.row_params import ROW_WORDS
from tinyvllm.util import DType

H200, A100 = DEVICES["sm_90a"], DEVICES["sm_80"]
ROWS = ("sample_slots", "sample_positions", "row_params")


def head_program(vocab, hidden, *, norm=False, filtered=False, bias=False, logits_kind=TEMP):
    p = Program("t")
    x = p.buffer("x", ("S", hidden), None, INPUT)
    p.buffer("sample_slots", ("S",), DType.I32, INPUT)
    p.buffer("sample_positions", ("S",), DType.I32, INPUT)
    p.buffer("row_params", ("SLOTS", ROW_WORDS), DType.I32, STATE)
    if norm:
        x = p.emit("rms_norm", "normed", x=x, weight=p.weight("norm", hidden), eps=1e-5)
    b = p.weight("b", vocab) if bias else None
    logits = p.emit(
        "matmul", "logits", x=x, weight=p.weight("w", vocab, hidden), bias=b, dtype=DType.F32,
        out_kind=logits_kind,
    )  # fmt: skip
    p.emit("sample", "tokens", logits=logits, filtered=filtered, out_kind=OUTPUT,
           **{name: name for name in ROWS})  # fmt: skip
    return p


def head_case(rows, vocab, hidden, settings, *, act=DType.BF16, steps=0, seed=1, padding=()):
    """(dims, arrays): normal logits of variance 4, or multiples of 1 / 4 in few `steps`: ties."""
    rng = np.random.default_rng(seed)
    dims, arrays = case(np.zeros((rows, 1)), settings, seed, padding)
    del arrays["logits"]
    x = rng.standard_normal((rows, hidden)) * 2
    w = rng.standard_normal((vocab, hidden)) / np.sqrt(hidden)
    if steps:
        x = rng.integers(-1, 2, x.shape) * (np.arange(hidden) < steps)
        w = rng.integers(-1, 2, w.shape) / 4
    arrays |= {"x": act.round(x.astype(np.float32)), "w": act.round(w.astype(np.float32))}
    arrays["norm"] = act.round(1 + rng.standard_normal(hidden).astype(np.float32) / 4)
    return dims, arrays


@pytest.mark.parametrize(("norm", "kind"), [(False, "matmul_sample"), (True, "norm_matmul_sample")])
def test_the_reference_is_that_of_the_parts(norm, kind):
    program = head_program(300, 24, norm=norm)
    lowered = lower(program, "decode")
    assert [op.kind for op in lowered.ops] == [kind]
    assert [part.kind for part in lowered.ops[0].parts] == ["rms_norm"] * norm + [
        "matmul",
        "sample",
    ]
    assert not {"logits", "normed"} & set(lowered.buffers), "they exist only inside the op"
    dims, arrays = head_case(9, 300, 24, [0.0, 1.0], padding=(4,))
    want, have = (run_numpy(p, dims, arrays)["tokens"] for p in (program, lowered))
    np.testing.assert_array_equal(have, want)
    assert have[4] == 0 and len(set(have.tolist())) > 5
    kinds = [op.kind for op in lower(program, "prefill").ops]
    assert kinds == ["rms_norm"] * norm + ["matmul_sample"]


def test_the_logits_inside_are_float32_for_a_twin_too():
    program = head_program(3000, 24)
    dims, arrays = head_case(200, 3000, 24, [0.0])
    want, have = (
        run_numpy(p, dims, arrays, round_to=DType.BF16)["tokens"]
        for p in (program, lower(program, "prefill"))
    )
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "options", [{"filtered": True}, {"bias": True}, {"logits_kind": OUTPUT}], ids=str
)
def test_logits_that_are_wanted_stay(options, phase):
    program = head_program(300, 24, **options)
    assert [op.kind for op in lower(program, phase).ops] == ["matmul", "sample"]


def test_logits_that_are_adjusted_stay():
    program = head_program(300, 24)
    program.emit("add", "sum", a="x", b="x", out_kind=OUTPUT)
    program.ops.insert(1, program.ops.pop())  # between product and sampling
    assert [op.kind for op in lower(program, "decode").ops] == ["matmul", "add", "sample"]


def launches(rows, device, *, norm=False, vocab=128256, hidden=2048):
    program = lower(head_program(vocab, hidden, norm=norm), "decode")
    dims = {"S": rows, "SLOTS": 512}
    operands = described(program, program.ops[0], dims, DType.BF16)
    return op_def(program.ops[0].kind).launches(operands, device)


@pytest.mark.parametrize("rows", [LOGITS_ROWS + 1, 64, 65, 256, 1024])
@pytest.mark.parametrize("norm", [False, True])
def test_many_rows_on_hopper_have_no_logits(rows, norm):
    *before, product, best = launches(rows, H200, norm=norm)
    assert [one.spec.kernel.entry for one in before] == ["rms_norm_kernel"] * norm
    assert product.spec.kernel is MATMUL_SAMPLE and best.grid == (rows, 1, 1)
    per_row = best.args[-1]
    assert per_row == -(-128256 // choose_sample(rows, 128256, H200).template[2])


@pytest.mark.parametrize(
    ("rows", "device", "kernel"),
    [
        (1, H200, MATMUL_FEW_ROWS),
        (LOGITS_ROWS, H200, MATMUL_WIDE),
        (256, A100, MATMUL_LARGE),
        (256, replace(H200, kernel_path="portable"), MATMUL_LARGE),
    ],
)
def test_others_have(rows, device, kernel):
    product, sample = launches(rows, device)
    assert product.spec.kernel is kernel
    assert sample.spec.kernel.entry == "sample_kernel"


def test_a_norm_is_in_the_product_at_one_row():
    assert [one.spec.kernel.file for one in launches(1, H200, norm=True)] == [
        "matmul_few_rows.cu",
        "sample.cu",
    ]


@pytest.mark.parametrize("tile", SAMPLE_TILES.values(), ids=str)
def test_tiles_fit(tile):
    assert tile.cols % 16 == 0
    assert tile.smem(1, warp_buffer=0) <= H200.smem_per_block


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("norm", [False, True])
def test_scratch_is_enough_for_fewer_rows(device, norm):
    """The plan is made for the most rows; a step of fewer may take another way."""
    program = lower(head_program(5003, 64, norm=norm), "decode")

    def scratch(rows):
        operands = described(program, program.ops[0], {"S": rows, "SLOTS": 512}, DType.BF16)
        return op_def(program.ops[0].kind).scratch(operands, device)

    sizes = [scratch(rows) for rows in (1, LOGITS_ROWS, LOGITS_ROWS + 1, 64, 65, 512)]
    assert sizes == sorted(sizes)
    plan = plan_program(program, {"S": 512, "SLOTS": 512}, DType.BF16, device)
    logits = 5003 * 4 * (512 if device is A100 else LOGITS_ROWS)
    assert logits <= sizes[-1] <= plan.arena_bytes <= logits + 65536 * norm + 2048 + 256


def both(device, monkeypatch, program, dims, arrays, act=DType.BF16):
    """Tokens of the fused op and of the two it replaced."""
    monkeypatch.setitem(RULES, "one", [fuse_norm, fuse_sample])
    monkeypatch.setitem(RULES, "two", [fuse_norm])
    room = {**dims, "S": dims["S"] + 3}  # with two ops the tokens may lie where others lay before
    return [
        run_cuda(device, lower(program, rules), dims, arrays, act, limits)["tokens"]
        for rules, limits in (("one", room), ("two", dims))
    ]


@pytest.fixture
def few_blocks(device, monkeypatch):
    """Several tiles for each block of the kernel, also where there are few."""
    monkeypatch.setattr(device, "info", replace(device.info, num_sms=6))


@pytest.mark.gpu
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("vocab", "hidden"), [(1, 8), (17, 576), (1000, 72), (5003, 2048), (50257, 64)]
)
def test_tokens_of_one_kernel_are_those_of_two(device, monkeypatch, vocab, hidden, norm, act):
    program = head_program(vocab, hidden, norm=norm)
    for rows in (1, 7, 33, 65, 130, 257, 576):
        settings = [0.0, 1.0, 0.3, 5.0, 1e-6]
        dims, arrays = head_case(rows, vocab, hidden, settings, act=act, padding=(rows // 2,))
        one, two = both(device, monkeypatch, program, dims, arrays, act)
        np.testing.assert_array_equal(one, two, err_msg=f"{rows} rows")
        assert one[rows // 2] == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0])
def test_ties_in_and_across_tiles_go_to_the_first_token(device, monkeypatch, temperature):
    program = head_program(3001, 64)
    for rows in (40, 200):
        dims, arrays = head_case(rows, 3001, 64, [temperature], steps=3)
        one, two = both(device, monkeypatch, program, dims, arrays)
        np.testing.assert_array_equal(one, two)
        if temperature < 1:
            logits = arrays["x"] @ arrays["w"].T
            clear = (logits.max(1) > 0) | (temperature == 0)  # the least noise changes a zero
            assert clear.sum() > 20
            np.testing.assert_array_equal(one[clear], logits.argmax(1)[clear])


@pytest.mark.gpu
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_special_values(device, monkeypatch, temperature):
    """An infinity in x makes infinities of either sign where the weight has one, NaN where not."""
    vocab, hidden, count = 700, 16, 140
    dims, arrays = head_case(count, vocab, hidden, [temperature])
    arrays["w"][:, :4] = np.sign(np.random.default_rng(3).integers(-1, 2, (vocab, 4)))
    arrays["w"][:, 1] = -np.abs(arrays["w"][:, 1])  # nothing above -infinity
    arrays["w"][:, 2] = -1  # nothing else
    arrays["w"][:300, 0], arrays["w"][:200, 1] = -1, 0
    for row in range(count):
        if row % 6 < 4:
            arrays["x"][row] = 0
            arrays["x"][row, row % 6] = np.nan if row % 6 == 3 else np.inf
    program = head_program(vocab, hidden)
    with np.errstate(invalid="ignore"):
        want = run_numpy(program, dims, arrays)["tokens"]
    one, two = both(device, monkeypatch, program, dims, arrays)
    np.testing.assert_array_equal(one, two)
    special = np.arange(count) % 6 < 4
    np.testing.assert_array_equal(one[special], want[special])
    assert (want[2::6] == 0).all() and (want[3::6] == 0).all()
    assert (want[0::6] == np.argmax(arrays["w"][:, 0] == 1)).all()
    assert (want[1::6] == np.argmax(arrays["w"][:, 1] == -1)).all()


@pytest.mark.gpu
def test_repeated_draws_are_the_same(device):
    program = lower(head_program(50257, 128), "decode")
    dims, arrays = head_case(256, 50257, 128, [1.0])
    first, *others = (run_cuda(device, program, dims, arrays)["tokens"] for _ in range(3))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.gpu
def test_each_tile(device, monkeypatch):
    for rows, tile in SAMPLE_TILES.items():
        monkeypatch.setattr(matmul_sample, "SAMPLE_TILES", {1 << 31: tile})
        dims, arrays = head_case(min(rows, 300) + 1, 1003, 200, [0.0, 1.0])
        one, two = both(device, monkeypatch, head_program(1003, 200), dims, arrays)
        np.testing.assert_array_equal(one, two)
