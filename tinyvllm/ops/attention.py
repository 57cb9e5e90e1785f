"""Causal attention over the paged KV cache: decode rows, prefill chunks, and how they are split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Shape
from tinyvllm.util import InputError, ceil_div

DECODE = Kernel(
    "attention_decode.cu",
    "attention_decode_kernel",
    "ptr q, ptr kv_cache, ptr block_tables, ptr batch_slots, ptr seq_lens, ptr inv_freq, ptr y, "
    "ptr partial_out, ptr partial_state, f32 scale_log2, i32 num_rows, i32 q_stride, i32 y_stride, "
    "i64 block_stride, i32 num_kv_heads, i32 group_size, i32 block_shift, i32 max_blocks, "
    "i32 max_partitions",
    pdl=True,
)
PREFILL = Kernel(
    "attention_prefill.cu",
    "attention_prefill_kernel",
    "ptr q, ptr kv_cache, ptr block_tables, ptr query_start, ptr batch_slots, ptr seq_lens, ptr y, "
    "f32 scale_log2, i32 first_row, i32 q_stride, i32 y_stride, i64 block_stride, "
    "i32 num_kv_heads, i32 group_size, i32 block_shift, i32 max_blocks",
    pdl=True,
)

HEAD_DIMS = (64, 128)

# Constants of attention_decode.cu: threads, tokens of the shortest partition, most partitions,
# query heads that share one read of K and V, most blocks, bytes of K and V in shared memory for
# each warp.
DECODE_THREADS = 128
MIN_PARTITION = 256
MAX_PARTITIONS = 64
DECODE_HEADS = 8
MAX_BLOCKS = 1024
RING_BYTES = 16384
# So many are resident on an SM of 228 KiB, by their registers too, each with 64 KiB in flight.
DECODE_BLOCKS_PER_SM = {64: 3, 128: 2}

# Constants of attention_prefill.cu: threads, queries and keys of a tile.
PREFILL_THREADS = 128
PREFILL_QUERIES = 64
PREFILL_KEYS = 64

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


def decode_blocks(rows: int, head_blocks: int, context: int, head_dim: int, num_sms: int) -> int:
    """Blocks that divide the partitions of all rows among them: as many as the GPU runs at once."""
    resident = min(MAX_BLOCKS, num_sms * DECODE_BLOCKS_PER_SM[head_dim])
    return min(resident, rows * head_blocks * max_partitions(context))


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
        head_dim = check_head_dim(a)
        num_decode, num_rows = a.dims["D"], a.seq_lens.shape[0]
        launches = []
        if num_decode > 0:
            launches.append(decode_launch(a, device, a.q, num_decode))
        if num_rows > num_decode:
            heads = a.q.shape[1] // head_dim
            grid = (ceil_div(a.dims["Q"], PREFILL_QUERIES), heads, num_rows - num_decode)
            spec = PREFILL(a.act, head_dim)
            launches.append(
                spec.launch(
                    grid,
                    PREFILL_THREADS,
                    smem=2 * 2 * PREFILL_KEYS * head_dim * a.act.itemsize,
                    query_start=a.query_start.ptr,
                    first_row=num_decode,
                    **_common(a, a.q),
                )
            )
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
    a: Operands, device: DeviceInfo, q: DeviceArray, rows: int, inv_freq: int | None = None
) -> Launch:
    """Attention of the first `rows` rows, one token each. With the address of `inv_freq`, `q`
    holds the heads of q, k and v, neither rotated nor in the cache yet."""
    kv_heads, head_dim = a.kv_cache.shape[3], check_head_dim(a)
    width, context = a.y.shape[1], a.dims["C"]
    blocks = decode_blocks(
        rows, _head_blocks(width, kv_heads, head_dim), context, head_dim, device.num_sms
    )
    return DECODE(a.act, head_dim, inv_freq is not None).launch(
        (blocks,),
        DECODE_THREADS,
        smem=DECODE_THREADS // 32 * RING_BYTES,
        inv_freq=inv_freq or 0,
        num_rows=rows,
        partial_out=a.scratch,
        partial_state=a.scratch + _states(a, device) * head_dim * 4,
        max_partitions=max_partitions(context),
        **_common(a, q),
    )


def decode_scratch(a: Operands, device: DeviceInfo) -> int:
    """Bytes for the states of all partitions of contexts that several blocks share."""
    return _states(a, device) * (check_head_dim(a) + 2) * 4


def _states(a: Operands, device: DeviceInfo) -> int:
    """Each block but the last may leave one row and head block to be finished by others."""
    kv_heads: int = a.kv_cache.shape[3]
    head_dim = check_head_dim(a)
    rows: int = a.seq_lens.shape[0]
    width: int = a.y.shape[1]
    partitions = max_partitions(a.dims["C"])
    if partitions == 1:
        return 0
    blocks = decode_blocks(
        rows, _head_blocks(width, kv_heads, head_dim), a.dims["C"], head_dim, device.num_sms
    )
    return blocks * partitions * min(DECODE_HEADS, width // head_dim // kv_heads)


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
