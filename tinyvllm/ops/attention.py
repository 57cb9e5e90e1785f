"""Causal attention over the paged KV cache: the op, its reference, how decode rows are split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.attention_prefill import prefill_launch
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Shape
from tinyvllm.util import InputError, ceil_div

DECODE = Kernel(
    "attention_decode.cu",
    "attention_decode_kernel",
    "ptr q, ptr kv_cache, ptr block_tables, ptr batch_slots, ptr seq_lens, ptr inv_freq, ptr y, "
    "ptr partial_out, ptr partial_state, f32 scale_log2, i32 num_rows, i32 q_stride, i32 y_stride, "
    "i64 block_stride, i32 num_kv_heads, i32 group_size, i32 block_shift, i32 max_blocks, "
    "i32 max_partitions, ptr ahead, i32 ahead_bytes",
    pdl=True,
)
HEAD_DIMS = (64, 128)

# Constants of attention_decode.cu: threads, tokens of the shortest partition, most partitions,
# query heads that share one read of K and V, most blocks, bytes of keys that a warp takes at once.
DECODE_THREADS = 128
MIN_PARTITION = 256
MAX_PARTITIONS = 32
DECODE_HEADS = 8
MAX_BLOCKS = 1024
TILE_BYTES = 4096
# Contexts of so few partitions are never shared by several blocks.
WHOLE_PARTITIONS = 2
# Nor are these, where the pairs are more than the GPU runs at once (64 rows of 1,024 tokens on an
# H200: 36.3 us against 38.3 shared). Longer ones may differ too much in length to go unshared.
WHOLE_MANY_PARTITIONS = 8
# Blocks resident on an SM of 228 KiB, by their registers too, each with two stages of tiles in
# flight: 64 KiB. With one stage there is one more.
DECODE_BLOCKS_PER_SM = {64: 3, 128: 2}
# Blocks on an SM that share contexts. All start at once and read as much; a third one adds no
# bandwidth, but some then get less of it, and the last one is late.
SHARING_BLOCKS_PER_SM = 2
# Of weights that attention brings to L2 up to so many rows, which leave most of the memory's
# bandwidth to them. Measured at 1 row and context 128: 8 MiB of gate and up save 11 us of a step,
# 16 MiB cost 30 us, as attention's own loads wait behind them; at 8 and 32 rows nothing is saved.
AHEAD_BYTES = 8 << 20
AHEAD_ROWS = 2

# The reference computes so many scores at once: 8 MiB of float32 stay in a CPU's cache.
REFERENCE_SCORES = 1 << 21


def partition_length(seq_len: int) -> int:
    """Tokens in one partition of a context of this length (attention_decode.cu does the same).

    It depends on the context alone: so does the order in which a row is reduced.
    """
    length = MIN_PARTITION
    while length * MAX_PARTITIONS < seq_len:
        length *= 2
    return length


def max_partitions(context: int) -> int:
    """Most partitions of any context of up to this length."""
    return min(MAX_PARTITIONS, ceil_div(context, MIN_PARTITION))


def decode_blocks(pairs: int, context: int, head_dim: int, num_sms: int) -> tuple[int, int]:
    """(blocks, partitions of a context): how decode attention divides its work.

    `pairs` of a row and a head block. 0 partitions: one block for each pair. That is best where
    splitting a context gains less than it costs to merge, and where the pairs alone keep the GPU
    busy for a while. Otherwise about as many blocks as the GPU runs at once share all partitions.
    """
    partitions = max_partitions(context)
    waves = pairs / (num_sms * DECODE_BLOCKS_PER_SM[head_dim])
    whole = partitions <= WHOLE_PARTITIONS or waves >= 2
    if whole or (waves > 1 and partitions <= WHOLE_MANY_PARTITIONS and head_dim == 64):
        return pairs, 0
    share = ceil_div(pairs * partitions, _sharing_blocks(num_sms))
    return ceil_div(pairs * partitions, share), partitions


def decode_stages(blocks: int, partitions: int, head_dim: int, num_sms: int) -> int:
    """Stages of a warp's ring of tiles: with one, more of the blocks that take turns are there.

    Where all blocks run at once, each waits less with two; and heads of 128 gain nothing by one
    (64 rows of 256 tokens on an H200: 23.7 us against 22.3).
    """
    turns = partitions == 0 and blocks > num_sms * DECODE_BLOCKS_PER_SM[head_dim]
    return 1 if turns and head_dim == 64 else 2


def decode_smem(blocks: int, stages: int, head_dim: int, device: DeviceInfo) -> int:
    """Shared memory of a block: its rings, and as much as keeps more blocks than needed off an SM.

    Blocks that start early would crowd onto the SMs that are free already.
    """
    most = DECODE_BLOCKS_PER_SM[head_dim] + (stages == 1)
    per_sm = min(most, ceil_div(blocks, device.num_sms))
    rings = DECODE_THREADS // 32 * stages * 2 * TILE_BYTES
    return max(rings, device.smem_per_block // (per_sm + 1))


class Attention(OpDef):
    """y[t] = softmax(scale * q[t] . K) V for each head, over positions 0 .. position of t.

    Row r holds tokens query_start[r] .. query_start[r+1]-1, the last of its seq_lens[r] positions;
    their own K and V are in the cache already. Of `dims`, D is the number of leading rows with
    exactly one token, Q bounds the tokens of the other rows, C bounds seq_lens. One of the leading
    rows may be padding, of length 0: its output is 0.
    """

    name = "attention"
    reads: ClassVar[Mapping[str, Shape]] = {
        "q": ("T", "NQ"),
        "kv_cache": ("NB", "L", 2, "HKV", "BS", "D"),
        "block_tables": ("G", "SLOTS", "MB"),
        "query_start": ("R1",),
        "batch_slots": ("R",),
        "seq_lens": ("R",),
    }
    writes: ClassVar[Mapping[str, Shape]] = {"y": ("T", "NQ")}
    attrs = frozenset({"layer", "group", "scale"})

    def reference(self, a: Operands) -> None:
        """One row at a time; nothing beyond a row's length is touched."""
        block_size, head_dim = a.kv_cache.shape[-2:]
        heads = a.q.shape[1] // head_dim
        q = (a.q * np.float32(a.scale)).reshape(-1, heads, head_dim)
        y = a.y.reshape(-1, heads, head_dim)
        tables, starts = a.block_tables[a.group], a.query_start.tolist()
        for row, (slot, length) in enumerate(
            zip(a.batch_slots.tolist(), a.seq_lens.tolist(), strict=True)
        ):
            tokens = slice(starts[row], starts[row + 1])
            if length == 0:
                y[tokens] = 0
                continue
            blocks = tables[slot, : ceil_div(length, block_size)]
            k, v = _gather(a.kv_cache, blocks, a.layer)[:, :, :length]
            _attend(q[tokens], k, v, y[tokens])

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        check_head_dim(a)
        num_decode = a.dims["D"]
        launches = []
        if num_decode > 0:
            launches.append(decode_launch(a, device, a.q, num_decode))
        if a.seq_lens.shape[0] > num_decode:
            launches.append(prefill_launch(a, device, num_decode, _common(a, a.q)))
        return launches

    def scratch(self, a: Operands, device: DeviceInfo) -> int:
        return decode_scratch(a, device)

    def cost(self, a: Operands) -> Cost:
        """With every context of length C: K and V of each row once, two products a score."""
        kv_heads, _, head_dim = a.kv_cache.shape[-3:]
        context, (tokens, width) = a.dims["C"], a.q.shape
        kv_values = a.seq_lens.shape[0] * context * 2 * kv_heads * head_dim
        return Cost((kv_values + 2 * tokens * width) * a.act.itemsize, 4 * tokens * context * width)


def check_head_dim(a: Operands) -> int:
    """The size of a head; InputError unless there are kernels for it."""
    head_dim: int = a.kv_cache.shape[-1]
    if head_dim not in HEAD_DIMS:
        raise InputError(f"head_dim={head_dim}: attention kernels exist for {HEAD_DIMS}")
    return head_dim


def _head_blocks(q_width: int, kv_heads: int, head_dim: int) -> int:
    """Head blocks of a row: query heads that are computed together."""
    return kv_heads * ceil_div(q_width // head_dim // kv_heads, DECODE_HEADS)


def decode_launch(
    a: Operands,
    device: DeviceInfo,
    q: DeviceArray,
    rows: int,
    *,
    inv_freq: int | None = None,
    ahead: DeviceArray | None = None,
) -> Launch:
    """Attention of the first `rows` rows, one token each. With the address of `inv_freq`, `q`
    holds the heads of q, k and v, neither rotated nor in the cache yet. Of `ahead`, weights that
    will be read soon, the first part is brought to L2 meanwhile if rows are few."""
    kv_heads, head_dim = a.kv_cache.shape[3], check_head_dim(a)
    width, context = a.y.shape[1], a.dims["C"]
    pairs = rows * _head_blocks(width, kv_heads, head_dim)
    blocks, partitions = decode_blocks(pairs, context, head_dim, device.num_sms)
    stages = decode_stages(blocks, partitions, head_dim, device.num_sms)
    return DECODE(a.act, head_dim, inv_freq is not None, partitions == 0, stages).launch(
        (blocks,),
        DECODE_THREADS,
        smem=decode_smem(blocks, stages, head_dim, device),
        inv_freq=inv_freq or 0,
        num_rows=rows,
        partial_out=a.scratch,
        partial_state=a.scratch + _states(a, device) * head_dim * 4,
        max_partitions=partitions,
        ahead=0 if ahead is None else ahead.ptr,
        ahead_bytes=0 if ahead is None or rows > AHEAD_ROWS else min(ahead.nbytes, AHEAD_BYTES),
        **_common(a, q),
    )


def decode_scratch(a: Operands, device: DeviceInfo) -> int:
    """Bytes for the states of all partitions of contexts that several blocks share."""
    return _states(a, device) * (check_head_dim(a) + 2) * 4


def _states(a: Operands, device: DeviceInfo) -> int:
    """Each block may be the first of a row and head block that others help with."""
    kv_heads, head_dim = a.kv_cache.shape[3], check_head_dim(a)
    width, partitions = a.y.shape[1], max_partitions(a.dims["C"])
    if partitions <= WHOLE_PARTITIONS:
        return 0
    pairs = a.seq_lens.shape[0] * _head_blocks(width, kv_heads, head_dim)
    blocks = min(_sharing_blocks(device.num_sms), pairs * partitions)
    group = min(DECODE_HEADS, width // head_dim // kv_heads)
    return int(blocks * partitions * group)


def _sharing_blocks(num_sms: int) -> int:
    return min(MAX_BLOCKS, num_sms * SHARING_BLOCKS_PER_SM)


def kv_address(a: Operands) -> dict[str, Any]:
    """Kernel arguments by which PagedKv finds K and V of the op's layer and KV group."""
    _, _, _, kv_heads, block_size, head_dim = a.kv_cache.shape
    layer_size = 2 * kv_heads * block_size * head_dim
    _, slots, max_blocks = a.block_tables.shape
    return {
        "kv_cache": a.kv_cache.ptr + a.layer * layer_size * a.act.itemsize,
        "block_tables": a.block_tables.ptr + a.group * slots * max_blocks * 4,
        "block_stride": a.kv_cache.shape[1] * layer_size,
        "num_kv_heads": kv_heads,
        "block_shift": block_size.bit_length() - 1,
        "max_blocks": max_blocks,
    }


def _common(a: Operands, q: DeviceArray) -> dict[str, Any]:
    """Arguments of both the decode and the prefill kernel."""
    return {
        "q": q.ptr,
        "q_stride": q.row_stride,
        "y": a.y.ptr,
        "y_stride": a.y.row_stride,
        "batch_slots": a.batch_slots.ptr,
        "seq_lens": a.seq_lens.ptr,
        "scale_log2": a.scale * math.log2(math.e),
        "group_size": a.y.shape[1] // (a.kv_cache.shape[3] * a.kv_cache.shape[5]),
        **kv_address(a),
    }


def _gather(kv_cache: np.ndarray, blocks: np.ndarray, layer: int) -> np.ndarray:
    """The layer's K and V of a sequence's blocks, in order: [2, kv_heads, positions, head_dim]."""
    _, _, _, kv_heads, block_size, head_dim = kv_cache.shape
    kv = np.empty((2, kv_heads, len(blocks), block_size, head_dim), kv_cache.dtype)
    of_layer = kv_cache[:, layer]
    for i, block in enumerate(blocks.tolist()):  # whole tiles: faster than one fancy index
        kv[:, :, i] = of_layer[block]
    return kv.reshape(2, kv_heads, -1, head_dim)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, y: np.ndarray) -> None:
    """One row: q (scaled), y [tokens, heads, head_dim] of the last positions of k and v
    [kv_heads, positions, head_dim]."""
    tokens, heads, head_dim = q.shape
    kv_heads, length, _ = k.shape
    group = heads // kv_heads
    step = max(1, REFERENCE_SCORES // (heads * length))  # queries at a time
    for start in range(0, tokens, step):
        queries = q[start : start + step].reshape(-1, kv_heads, group, head_dim)
        count = len(queries)
        past = length - tokens + start  # positions that all of these queries see
        visible = past + count
        grouped = queries.swapaxes(0, 1).reshape(kv_heads, count * group, head_dim)
        scores = grouped @ k[:, :visible].swapaxes(1, 2)
        if count > 1:
            by_query = scores.reshape(kv_heads, count, group, visible)
            future = np.triu(np.full((count, count), -np.inf, np.float32), 1)
            by_query[..., past:] += future[:, None]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = scores @ v[:, :visible]
        out /= scores.sum(axis=-1, keepdims=True)
        by_head = out.reshape(kv_heads, count, group, head_dim).swapaxes(0, 1)
        y[start : start + step] = by_head.reshape(count, heads, head_dim)
