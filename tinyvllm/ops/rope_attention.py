"""RoPE, KV write and attention of rows that have one new token each, as one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tinyvllm.driver.spec import DeviceInfo, Launch
from tinyvllm.ops.attention import decode_launch, decode_scratch
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.program import Shape


class RopeAttention(OpDef):
    """Rope of the q and k columns of `qkv`, the KV write, and attention over the context.

    Row r has the token r only, at position seq_lens[r] - 1, or is padding, of length 0: its
    output is 0, and nothing is written to the cache. `ahead`, if given, are weights that an op soon
    after reads: they may be brought to L2 meanwhile.
    """

    name = "rope_attention"
    reads: ClassVar[Mapping[str, Shape]] = {
        "qkv": ("T", "N"),
        "inv_freq": ("F",),
        "positions": ("T",),
        "token_slots": ("T",),
        "block_tables": ("G", "SLOTS", "MB"),
        "query_start": ("R1",),
        "batch_slots": ("R",),
        "seq_lens": ("R",),
        "kv_cache": ("NB", "L", 2, "HKV", "BS", "D"),
        "ahead": ("NA", "KA"),
    }
    writes: ClassVar[Mapping[str, Shape]] = {
        "y": ("T", "NQ"),
        "kv_cache": ("NB", "L", 2, "HKV", "BS", "D"),
    }
    optional = frozenset({"ahead"})
    attrs = frozenset({"layer", "group", "scale"})

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        rows = a.seq_lens.shape[0]
        assert a.dims["D"] == rows == a.qkv.shape[0], "rows of one token each"
        return [decode_launch(a, device, a.qkv, rows, inv_freq=a.inv_freq.ptr, ahead=a.ahead)]

    def scratch(self, a: Operands, device: DeviceInfo) -> int:
        return decode_scratch(a, device)

    def cost(self, a: Operands) -> Cost:
        """With every context of length C: K and V of each row once, two products a score."""
        kv_heads, _, head_dim = a.kv_cache.shape[-3:]
        context, (rows, width) = a.dims["C"], a.y.shape
        read = rows * (context - 1) * 2 * kv_heads * head_dim + rows * a.qkv.shape[1]
        written = rows * (width + 2 * kv_heads * head_dim)
        return Cost((read + written) * a.act.itemsize, 4 * rows * context * width)
