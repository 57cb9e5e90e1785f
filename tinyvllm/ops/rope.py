"""Rotary position embedding and the write of keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.ops.attention import kv_address
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Shape
from tinyvllm.util import align_up

ROPE = Kernel(
    "rope.cu",
    "rope_kernel",
    "ptr x, ptr positions, ptr inv_freq, ptr y, i32 x_stride, i32 y_stride, i32 num_heads, "
    "i32 half_dim",
    pdl=True,
)
KV_WRITE = Kernel(
    "rope.cu",
    "kv_write_kernel",
    "ptr k, ptr v, ptr positions, ptr token_slots, ptr block_tables, ptr kv_cache, i32 k_stride, "
    "i32 v_stride, i64 block_stride, i32 num_kv_heads, i32 half_dim, i32 block_shift, "
    "i32 max_blocks",
    pdl=True,
)
ROPE_KV_WRITE = Kernel(
    "rope.cu",
    "rope_kv_write_kernel",
    "ptr qkv, ptr positions, ptr token_slots, ptr block_tables, ptr inv_freq, ptr q, ptr kv_cache, "
    "i32 qkv_stride, i32 q_stride, i64 block_stride, i32 num_heads, i32 num_kv_heads, "
    "i32 half_dim, i32 block_shift, i32 max_blocks",
    pdl=True,
)

# Constants of rope.cu: most threads in a block, pairs that one of them turns.
MAX_THREADS = 256
PAIRS = 4

_KV_READS: Mapping[str, Shape] = {
    "positions": ("T",),
    "token_slots": ("T",),
    "block_tables": ("G", "SLOTS", "MB"),
}
_KV_CACHE: Shape = ("NB", "L", 2, "HKV", "BS", "D")


def block_threads(num_heads: int, head_dim: int) -> int:
    """Threads for the heads of one token, whole warps; each takes PAIRS pairs of a head."""
    assert head_dim % (2 * PAIRS) == 0, f"head_dim {head_dim}"
    return min(MAX_THREADS, align_up(num_heads * head_dim // (2 * PAIRS), 32))


class Rope(OpDef):
    """Turns pairs (i, i + head_dim/2) of each head by the angle position * inv_freq[i].

    The angle is the float32 product, its sine and cosine are float32.
    """

    name = "rope"
    reads: ClassVar[Mapping[str, Shape]] = {
        "x": ("T", "N"),
        "positions": ("T",),
        "inv_freq": ("F",),
    }
    writes: ClassVar[Mapping[str, Shape]] = {"y": ("T", "N")}
    attrs = frozenset({"head_dim"})

    def reference(self, a: Operands) -> None:
        half = a.head_dim // 2
        angle = a.positions.astype(np.float32)[:, None] * a.inv_freq
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        x = a.x.reshape(len(angle), -1, a.head_dim)
        y = a.y.reshape(x.shape)
        low, high = x[..., :half], x[..., half:]
        y[..., :half] = low * cos - high * sin
        y[..., half:] = high * cos + low * sin

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        tokens, width = a.x.shape
        heads = width // a.head_dim
        return [
            ROPE(a.act).launch(
                (tokens,),
                block_threads(heads, a.head_dim),
                x=a.x.ptr,
                positions=a.positions.ptr,
                inv_freq=a.inv_freq.ptr,
                y=a.y.ptr,
                x_stride=a.x.row_stride,
                y_stride=a.y.row_stride,
                num_heads=heads,
                half_dim=a.head_dim // 2,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        tokens, width = a.x.shape
        return Cost(2 * tokens * width * a.act.itemsize + 4 * (tokens + a.inv_freq.shape[0]))


class KvWrite(OpDef):
    """Writes the keys and values of tokens at their positions in their sequences' blocks; those
    of padding tokens (slot -1) nowhere."""

    name = "kv_write"
    reads: ClassVar[Mapping[str, Shape]] = {"k": ("T", "NK"), "v": ("T", "NK"), **_KV_READS}
    writes: ClassVar[Mapping[str, Shape]] = {"kv_cache": _KV_CACHE}
    attrs = frozenset({"layer", "group"})

    def reference(self, a: Operands) -> None:
        kv_heads, block_size, head_dim = a.kv_cache.shape[-3:]
        real = a.token_slots >= 0
        index, place = np.divmod(a.positions[real], block_size)
        block = a.block_tables[a.group, a.token_slots[real], index]
        for which, values in enumerate((a.k[real], a.v[real])):
            a.kv_cache[block, a.layer, which, :, place] = values.reshape(-1, kv_heads, head_dim)

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        kv_heads, _, head_dim = a.kv_cache.shape[-3:]
        return [
            KV_WRITE(a.act).launch(
                (a.k.shape[0],),
                block_threads(kv_heads, head_dim),
                k=a.k.ptr,
                v=a.v.ptr,
                positions=a.positions.ptr,
                token_slots=a.token_slots.ptr,
                k_stride=a.k.row_stride,
                v_stride=a.v.row_stride,
                half_dim=head_dim // 2,
                **kv_address(a),
            )
        ]

    def cost(self, a: Operands) -> Cost:
        tokens, width = a.k.shape
        return Cost(4 * tokens * width * a.act.itemsize + 3 * 4 * tokens)


def rope_kv_write_launch(a: Operands, qkv: DeviceArray) -> Launch:
    """The launch for the operands of rope_kv_write, with these columns of q, k and v."""
    head_dim = a.kv_cache.shape[-1]
    tokens, width = qkv.shape
    return ROPE_KV_WRITE(a.act).launch(
        (tokens,),
        block_threads(width // head_dim, head_dim),
        qkv=qkv.ptr,
        positions=a.positions.ptr,
        token_slots=a.token_slots.ptr,
        inv_freq=a.inv_freq.ptr,
        q=a.q.ptr,
        qkv_stride=qkv.row_stride,
        q_stride=a.q.row_stride,
        num_heads=a.q.shape[1] // head_dim,
        half_dim=head_dim // 2,
        **kv_address(a),
    )


class RopeKvWrite(OpDef):
    """Rope of the q and k columns of `qkv`, and the KV write of the turned k and of v."""

    name = "rope_kv_write"
    reads: ClassVar[Mapping[str, Shape]] = {"qkv": ("T", "N"), **_KV_READS, "inv_freq": ("F",)}
    writes: ClassVar[Mapping[str, Shape]] = {"q": ("T", "NQ"), "kv_cache": _KV_CACHE}
    attrs = frozenset({"layer", "group"})

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        return [rope_kv_write_launch(a, a.qkv)]

    def cost(self, a: Operands) -> Cost:
        tokens, width = a.qkv.shape
        return Cost(2 * tokens * width * a.act.itemsize + 4 * (3 * tokens + a.inv_freq.shape[0]))
