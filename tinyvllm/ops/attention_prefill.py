"""Launches of prefill attention: the kernel and its tile, chosen by shapes and the device alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch, TensorMap
from tinyvllm.ops.op import Operands
from tinyvllm.util import ceil_div

PREFILL = Kernel(
    "attention_prefill.cu",
    "attention_prefill_kernel",
    "ptr q, ptr kv_cache, ptr block_tables, ptr query_start, ptr batch_slots, ptr seq_lens, ptr y, "
    "f32 scale_log2, i32 first_row, i32 q_stride, i32 y_stride, i64 block_stride, "
    "i32 num_kv_heads, i32 group_size, i32 block_shift, i32 max_blocks",
    pdl=True,
)
PREFILL_HOPPER = Kernel(
    "attention_prefill_hopper.cu",
    "attention_prefill_hopper_kernel",
    "map q_map, map kv_map, ptr block_tables, ptr query_start, ptr batch_slots, ptr seq_lens, "
    "ptr y, f32 scale_log2, i32 num_rows, i32 num_heads, i32 group_size, i32 y_stride, "
    "i32 block_rows, i32 layer_row, i32 block_shift, i32 max_blocks",
    arch="sm_90a",
    pdl=True,
)

# Constants of attention_prefill.cu: threads, queries and keys of a tile.
THREADS = 128
QUERIES = 64
KEYS = 64

# Constants of attention_prefill_hopper.cu.
HOPPER_KEYS = 128
HOPPER_STAGES = 3
BOX_COLS = 64  # elements of a head that it copies at a time


class PrefillTile(NamedTuple):
    """A specialisation of attention_prefill_hopper.cu for heads of one size.

    On a busy H200 a tile takes `tile_us`, and `step_us` more for every HOPPER_KEYS keys.
    """

    consumers: int
    step_us: float
    tile_us: float

    @property
    def queries(self) -> int:
        return 64 * self.consumers

    def smem(self, head_dim: int) -> int:
        """Bytes of dynamic shared memory: queries, stages of keys and values, what they are for,
        barriers."""
        tokens = self.queries + 2 * HOPPER_STAGES * HOPPER_KEYS
        return tokens * head_dim * 2 + 16 + 8 * (3 + 4 * HOPPER_STAGES)


# Three consumers share each copy and leave tensor cores idle less often; two waste less of the
# last tile of a chunk and of the keys behind the diagonal. Three do not fit heads of 128.
PREFILL_TILES = {
    64: (PrefillTile(2, 1.07, 1.3), PrefillTile(3, 1.41, 1.8)),
    128: (PrefillTile(2, 1.56, 1.7),),
}


def choose_tile(head_dim: int, tokens: int, rows: int, heads: int, num_sms: int) -> PrefillTile:
    """The tile with the least estimated time for `rows` chunks of `tokens` in all.

    That is the mean time of an SM, and a third of the longest tile's at the end: within 4 % of
    what was measured. All chunks count as equally long and without earlier context, which is not
    known here; results do not depend on the choice.
    """
    each = ceil_div(tokens, rows)

    def time(tile: PrefillTile) -> float:
        per_chunk = ceil_div(each, tile.queries)
        mean_steps = (per_chunk + 1) * tile.queries / 2 / HOPPER_KEYS
        mean = tile.tile_us + tile.step_us * mean_steps
        longest = tile.tile_us + tile.step_us * each / HOPPER_KEYS
        return rows * per_chunk * heads / num_sms * mean + longest / 3

    return min(PREFILL_TILES[head_dim], key=time)


def prefill_launch(
    a: Operands, device: DeviceInfo, first_row: int, common: Mapping[str, Any]
) -> Launch:
    """Attention of the rows from `first_row` on; those before have one token each.

    `common` holds arguments that kernels of decode attention take too, and more, by their names.
    """
    rows = a.seq_lens.shape[0] - first_row
    head_dim = a.kv_cache.shape[-1]
    heads = a.q.shape[1] // head_dim
    if device.kernel_path == "hopper":
        return _hopper_launch(a, device, first_row, rows, heads, common)
    return PREFILL(a.act, head_dim).launch(
        (ceil_div(a.dims["Q"], QUERIES), heads, rows),
        THREADS,
        smem=2 * 2 * KEYS * head_dim * a.act.itemsize,
        query_start=a.query_start.ptr,
        first_row=first_row,
        **common,
    )


def _hopper_launch(
    a: Operands,
    device: DeviceInfo,
    first_row: int,
    rows: int,
    heads: int,
    common: Mapping[str, Any],
) -> Launch:
    blocks, layers, _, kv_heads, block_size, head_dim = a.kv_cache.shape
    layer_rows = 2 * kv_heads * block_size
    tokens = a.q.shape[0] - first_row
    tile = choose_tile(head_dim, tokens, rows, heads, device.num_sms)
    most_tiles = ((tokens - rows) // tile.queries + rows) * heads
    assert a.q.row_stride % 8 == 0 and a.y.ptr % 16 == 0 and a.y.row_stride % 8 == 0
    shared = {n: common[n] for _, n in PREFILL_HOPPER.params if n in common}
    # Rows are found by addresses: this kernel knows no row before its first one.
    shared |= {n: common[n] + 4 * first_row for n in ("batch_slots", "seq_lens")}
    return PREFILL_HOPPER(a.act, head_dim, tile.consumers).launch(
        (min(device.num_sms, most_tiles),),
        128 * (tile.consumers + 1),
        smem=tile.smem(head_dim),
        **shared,
        q_map=TensorMap(
            a.q.ptr, a.act, a.q.max_rows, a.q.shape[1], a.q.row_stride, tile.queries, BOX_COLS
        ),
        kv_map=TensorMap(
            a.kv_cache.ptr,
            a.act,
            blocks * layers * layer_rows,
            head_dim,
            head_dim,
            block_size,
            BOX_COLS,
        ),
        query_start=a.query_start.ptr + 4 * first_row,
        num_rows=rows,
        num_heads=heads,
        block_rows=layers * layer_rows,
        layer_row=a.layer * layer_rows,
    )
