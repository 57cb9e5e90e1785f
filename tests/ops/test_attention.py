"""Paged attention: the reference, how contexts are split, and decode rows at awkward lengths."""

import re

import numpy as np
import pytest
from harness import check_cuda, outputs_of, run_cuda, run_numpy
from paged import GROUP, LAYER, LAYERS, cache_dims, paged_cache

from tinyvllm.driver.compiler import cuda_src_dir
from tinyvllm.driver.spec import DeviceInfo
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops import attention
from tinyvllm.ops.op import Operands
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.util import DType, InputError, ceil_div

H200 = DeviceInfo("H200", (9, 0), 132, 227 << 10, 140 << 30)
CONTEXTS = [1, 7, 16, 17, 63, 200, 1000, 4097]


def attention_program(heads, kv_heads, head_dim, block_size, outputs=("y",)):
    p = Program("test")
    i32 = DType.I32
    p.buffer("kv_cache", ("NB", LAYERS, 2, kv_heads, block_size, head_dim), kind=STATE)
    p.buffer("block_tables", (2, "SLOTS", "MB"), i32, STATE)
    for name, dim in (("query_start", "R1"), ("batch_slots", "R"), ("seq_lens", "R")):
        p.buffer(name, (dim,), i32, INPUT)
    q = p.buffer("q", ("T", heads * head_dim), kind=INPUT)
    for output in outputs:
        p.emit(
            "attention",
            output,
            q=q,
            kv_cache="kv_cache",
            block_tables="block_tables",
            query_start="query_start",
            batch_slots="batch_slots",
            seq_lens="seq_lens",
            layer=LAYER,
            group=GROUP,
            scale=head_dim**-0.5,
            out_kind=OUTPUT,
        )
    return p


def problem(rows, heads, kv_heads, head_dim, block_size, seed=0):
    """dims and arrays for rows of (new tokens, earlier tokens)."""
    rng = np.random.default_rng(seed)
    lengths = [new + earlier for new, earlier in rows]
    paged = paged_cache(rng, lengths, lengths, kv_heads, head_dim, block_size)
    starts = np.cumsum([0, *(new for new, _ in rows)]).astype(np.int32)
    decode = next((i for i, (new, _) in enumerate(rows) if new > 1), len(rows))
    dims = {
        "T": int(starts[-1]),
        "R": len(rows),
        "R1": len(rows) + 1,
        "D": decode,
        "Q": max((new for new, _ in rows[decode:]), default=0),
        "C": max(lengths) + 3,
        **cache_dims(paged),
    }
    # Twice the usual spread of queries: weights differ enough for a wrong one to show.
    q = 2 * rng.standard_normal((dims["T"], heads * head_dim), np.float32)
    return dims, {
        **paged,
        "query_start": starts,
        "seq_lens": np.array(lengths, np.int32),
        "q": q,
    }


def exact(arrays, heads, kv_heads, head_dim, block_size):
    """float64, one query and one head at a time."""
    q = arrays["q"].astype(np.float64).reshape(-1, heads, head_dim)
    y = np.empty_like(q)
    for r, slot in enumerate(arrays["batch_slots"]):
        start, end = arrays["query_start"][r : r + 2]
        for t in range(start, end):
            at = np.arange(arrays["seq_lens"][r] - (end - t) + 1)
            blocks = arrays["block_tables"][GROUP, slot, at // block_size]
            for h in range(heads):
                kv = arrays["kv_cache"][blocks, LAYER, :, h * kv_heads // heads, at % block_size]
                score = kv[:, 0].astype(np.float64) @ q[t, h] / np.sqrt(head_dim)
                weight = np.exp(score - score.max())
                y[t, h] = weight @ kv[:, 1] / weight.sum()
    return y.reshape(len(y), -1)


def operands(rows, heads, kv_heads, head_dim, *, decode, context, queries=1, block_size=16):
    def array(*shape, dtype=DType.I32):
        return DeviceArray(0, shape, dtype)

    tokens = decode + (rows - decode) * queries
    q = array(tokens, heads * head_dim, dtype=DType.BF16)
    return Operands(
        q=q,
        y=q,
        kv_cache=array(100, 2, 2, kv_heads, block_size, head_dim, dtype=DType.BF16),
        block_tables=array(1, rows, 10),
        query_start=array(rows + 1),
        batch_slots=array(rows),
        seq_lens=array(rows),
        layer=0,
        group=0,
        scale=0.125,
        act=DType.BF16,
        scratch=1 << 20,
        dims={"D": decode, "C": context, "Q": queries},
    )


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 8), (64, 16), (128, 32), (128, 64)])
def test_reference(group, head_dim, block_size):
    heads, kv_heads = 2 * group, 2
    rows = [(1, 0), (1, 40), (1, 6), (9, 0), (1, 15), (20, 33)]
    dims, arrays = problem(rows, heads, kv_heads, head_dim, block_size)
    program = attention_program(heads, kv_heads, head_dim, block_size)
    got = run_numpy(program, dims, arrays)["y"]
    want = exact(arrays, heads, kv_heads, head_dim, block_size)
    np.testing.assert_allclose(got, want, atol=2e-5)


PADDING = [1, 3]  # rows


def with_padding(arrays):
    """Some decode rows belong to no slot and have length 0."""
    arrays["batch_slots"][PADDING], arrays["seq_lens"][PADDING] = -1, 0
    return arrays


def test_padding_rows_are_zeros_and_change_no_other():
    shape = (6, 2, 64, 16)
    dims, arrays = problem([(1, 30), (1, 4), (1, 150), (1, 9)], *shape)
    program = attention_program(*shape)
    want = run_numpy(program, dims, arrays)["y"]
    want[PADDING] = 0
    got = run_numpy(program, dims, with_padding(arrays))["y"]
    np.testing.assert_array_equal(got, want)


def test_reference_in_small_steps(monkeypatch):
    shape = (6, 2, 64, 16)
    dims, arrays = problem([(1, 30), (50, 21)], *shape)
    whole = run_numpy(attention_program(*shape), dims, arrays)["y"]
    monkeypatch.setattr(attention, "REFERENCE_SCORES", 6 * 71 * 8)
    in_steps = run_numpy(attention_program(*shape), dims, arrays)["y"]
    np.testing.assert_allclose(in_steps, whole, atol=1e-5)


def test_chunks_equal_the_whole():
    shape = (6, 2, 64, 16)
    dims, arrays = problem([(50, 0)], *shape)
    program = attention_program(*shape)
    whole = run_numpy(program, dims, arrays)["y"]
    for start, end in ((0, 19), (19, 20), (20, 50)):
        n = end - start
        chunk = arrays | {
            "q": arrays["q"][start:end],
            "query_start": np.array([0, n], np.int32),
            "seq_lens": np.array([end], np.int32),
        }
        got = run_numpy(program, dims | {"T": n, "Q": n, "D": int(n == 1)}, chunk)["y"]
        np.testing.assert_allclose(got, whole[start:end], atol=1e-5)


def constants(file):
    text = (cuda_src_dir() / file).read_text()
    return {n: int(v) for n, v in re.findall(r"constexpr int (k\w+) = (\d+);", text)}


def test_constants_are_those_of_the_kernel():
    decode = constants("attention_decode.cu") | constants("include/attention_work.cuh")
    shared = {
        "kThreads": attention.DECODE_THREADS,
        "kMinPartition": attention.MIN_PARTITION,
        "kMaxPartitions": attention.MAX_PARTITIONS,
        "kHeads": attention.DECODE_HEADS,
        "kMaxBlocks": attention.MAX_BLOCKS,
        "kTileBytes": attention.TILE_BYTES,
    }
    assert decode.items() >= shared.items()


def test_partitions_of_every_context_fit_the_scratch():
    lengths = [*range(1, 3000, 7), 8191, 8192, 8193, 16384, 16385, 131072, 10**6]
    for length in lengths:
        count = ceil_div(length, attention.partition_length(length))
        for context in (length, length + 1, 2 * length):
            assert 1 <= count <= attention.max_partitions(context) <= attention.MAX_PARTITIONS


@pytest.mark.parametrize(
    ("rows", "context", "head_dim", "expected"),
    [
        (1, 512, 64, (8, 0)),
        (1, 513, 64, (24, 3)),
        (1, 4096, 64, (128, 16)),
        (1, 131072, 64, (256, 32)),
        (3, 131072, 64, (256, 32)),  # three partitions each
        (32, 4096, 64, (256, 16)),  # all of a row and head block each
        (50, 2048, 64, (400, 0)),  # more than run at once
        (49, 2048, 64, (262, 8)),
        (50, 2049, 64, (258, 9)),
        (50, 2048, 128, (247, 8)),
        (99, 4096, 64, (792, 0)),
        (66, 4096, 128, (528, 0)),
    ],
)
def test_decode_blocks(rows, context, head_dim, expected):
    assert attention.decode_blocks(rows * 8, context, head_dim, 132) == expected


@pytest.mark.parametrize(("rows", "context", "whole"), [(1, 512, "true"), (1, 513, "false")])
def test_whole_contexts_have_a_kernel_without_the_code_that_shares(rows, context, whole):
    a = operands(rows, 32, 8, 64, decode=rows, context=context)
    (launch,) = attention.Attention().launches(a, H200)
    assert launch.spec.template_args == ("__nv_bfloat16", "64", "false", whole, "2")


def test_no_more_blocks_share_contexts_than_there_are_counters():
    blocks, partitions = attention.decode_blocks(200, 4096, 64, num_sms=10**4)
    assert 0 < blocks <= attention.MAX_BLOCKS and partitions == 16


@pytest.mark.parametrize(
    ("blocks", "partitions", "head_dim", "stages"),
    [(396, 0, 64, 2), (397, 0, 64, 1), (10**4, 0, 128, 2), (10**4, 4, 64, 2)],
)
def test_rings_of_one_stage_where_whole_contexts_take_turns(blocks, partitions, head_dim, stages):
    assert attention.decode_stages(blocks, partitions, head_dim, 132) == stages


@pytest.mark.parametrize(
    ("blocks", "stages", "head_dim", "per_sm"),
    [
        (1, 2, 64, 1),
        (132, 2, 64, 1),
        (133, 2, 64, 2),
        (264, 2, 64, 2),
        (265, 2, 64, 3),
        (10**4, 2, 64, 3),
        (10**4, 1, 64, 4),
        (10**4, 2, 128, 2),
        (10**4, 1, 128, 3),
    ],
)
def test_blocks_on_an_sm(blocks, stages, head_dim, per_sm):
    """As many as there are registers for; fewer, if that spreads few rows over all SMs."""
    sm, static = H200.smem_per_block + 1024, {64: 9344, 128: 17792}[head_dim] + 1024
    assert sm // (attention.decode_smem(blocks, stages, head_dim, H200) + static) == per_sm


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (32, 8), (22, 2), (8, 8)])
@pytest.mark.parametrize("context", [100, 1000, 100000])
def test_scratch_bounds_all_smaller_steps(heads, kv_heads, context):
    op = attention.Attention()
    for limit in (1, 16, 200):
        bound = op.scratch(
            operands(limit, heads, kv_heads, 64, decode=limit, context=context), H200
        )
        for rows in {1, min(15, limit), min(100, limit), limit}:
            for c in {min(context, 300), context}:
                a = operands(rows, heads, kv_heads, 64, decode=rows, context=c)
                (launch,) = op.launches(a, H200)
                names = [n for _, n in attention.DECODE.params]
                args = dict(zip(names, launch.args, strict=True))
                partitions = args["max_partitions"]
                if partitions > 1:  # contexts may be split: the last state's end
                    group = min(heads // kv_heads, attention.DECODE_HEADS)
                    states = launch.grid[0] * partitions * group
                    assert args["partial_out"] == a.scratch
                    assert args["partial_state"] >= a.scratch + states * 64 * 4
                    assert args["partial_state"] + states * 8 <= a.scratch + bound


def test_launches_cover_decode_and_prefill_rows():
    op = attention.Attention()
    a = operands(7, 32, 8, 128, decode=4, context=500, queries=130)
    decode, prefill = op.launches(a, H200)
    assert decode.grid == (32, 1, 1) and decode.smem >= 65536
    assert prefill.grid == (3, 32, 3) and prefill.smem == 65536
    assert len(op.launches(operands(3, 8, 8, 64, decode=0, context=50, queries=9), H200)) == 1
    (decode,) = op.launches(operands(3, 8, 8, 64, decode=3, context=50), H200)
    assert decode.grid == (24, 1, 1)
    (decode,) = op.launches(operands(3, 18, 2, 64, decode=3, context=50), H200)
    assert decode.grid == (12, 1, 1), "a group of 9 makes two head blocks"
    with pytest.raises(InputError, match="head_dim=80"):
        op.launches(operands(1, 8, 8, 80, decode=1, context=50), H200)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "block_size"),
    [
        (1, 2, 64, 8),
        (3, 3, 64, 16),
        (4, 2, 64, 32),
        (8, 1, 128, 64),
        (11, 1, 128, 16),
        (2, 2, 128, 8),
        (5, 1, 64, 64),
        (6, 1, 64, 16),
        (7, 1, 128, 16),
    ],
)
def test_decode_kernel(device, group, kv_heads, head_dim, block_size, act):
    shape = (group * kv_heads, kv_heads, head_dim, block_size)
    dims, arrays = problem([(1, n - 1) for n in CONTEXTS], *shape)
    program = attention_program(*shape)
    check_cuda(device, program, program, dims, arrays, act, {"T": 10})


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 7, None])
@pytest.mark.parametrize("group", [3, 11])
def test_decode_of_padding_rows(device, monkeypatch, group, blocks):
    """Whether one block takes all partitions of a context or several share them, or (None) each
    block has just one."""
    shape = (2 * group, 2, 64, 16)
    dims, arrays = problem([(1, 30), (1, 4), (1, 999), (1, 9)], *shape)
    monkeypatch.setattr(
        attention, "decode_blocks", lambda pairs, *_: (blocks, 4) if blocks else (pairs, 0)
    )
    program = attention_program(*shape)
    got = check_cuda(device, program, program, dims, with_padding(arrays), limits={"T": 6})["y"]
    assert (got[PADDING] == 0).all()


@pytest.mark.gpu
def test_decode_of_the_longest_partitions(device):
    shape = (4, 1, 64, 64)
    dims, arrays = problem([(1, 16384), (1, 20000), (1, 16383)], *shape)
    program = attention_program(*shape)
    check_cuda(device, program, program, dims, arrays)


@pytest.mark.gpu
def test_decode_result_does_not_depend_on_the_batch(device, monkeypatch):
    """To the bit: alone, in a batch, over many blocks, merged inside of one, a block for each
    context; several times over, as blocks that share one leave their counter as they found it."""
    shape = (8, 2, 64, 16)
    dims, arrays = problem([(1, 4096), (1, 299), (1, 1500)], *shape)
    program = attention_program(*shape, outputs=("y", "again", "and_again"))
    batch = run_cuda(device, program, dims, arrays)["y"]
    for *divided, stages in (
        (1, 17, 2),
        (2, 17, 2),
        (3, 17, 2),
        (16, 17, 2),
        (37, 17, 2),
        (6, 0, 2),
        (6, 0, 1),
    ):
        monkeypatch.setattr(attention, "decode_blocks", lambda *_, d=divided: d)
        monkeypatch.setattr(attention, "decode_stages", lambda *_, s=stages: s)
        got = run_cuda(device, program, dims, arrays)
        for output in outputs_of(program):
            np.testing.assert_array_equal(got[output], batch)
    monkeypatch.undo()
    for r in range(3):
        one = {n: arrays[n][r : r + 1] for n in ("q", "batch_slots", "seq_lens")}
        one["query_start"] = np.array([0, 1], np.int32)
        alone = run_cuda(device, program, dims | {"T": 1, "R": 1, "R1": 2, "D": 1}, arrays | one)
        np.testing.assert_array_equal(alone["y"][0], batch[r])
