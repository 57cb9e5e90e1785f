"""The kernels that compute products, and how one of them is launched."""

from __future__ import annotations

from typing import NamedTuple

from tinyvllm.driver.spec import Kernel

_SIGNATURE = (
    "ptr x, ptr weight, ptr bias, ptr residual, ptr y, i32 M, i32 N, i32 K, "
    "i32 x_stride, i32 residual_stride, i32 y_stride"
)
MATMUL = Kernel("matmul.cu", "matmul_kernel", f"{_SIGNATURE}, i32 split", pdl=True)
MATMUL_LARGE = Kernel("matmul_large.cu", "matmul_large_kernel", _SIGNATURE, pdl=True)
MATMUL_WIDE = Kernel(
    "matmul_wide.cu", "matmul_wide_kernel", f"{_SIGNATURE}, i32 split", arch="sm_90a", pdl=True
)
MATMUL_HOPPER = Kernel(
    "matmul_hopper.cu",
    "matmul_hopper_kernel",
    "map x_map, map weight_map, map y_map, ptr bias, ptr residual, ptr y, i32 M, i32 N, i32 K, "
    "i32 residual_stride, i32 y_stride, i32 by_map, i32 split, i32 group",
    arch="sm_90a",
    pdl=True,
)
MATMUL_ROPE_KV_WRITE = Kernel(
    "matmul_hopper.cu",
    "matmul_rope_kv_write_kernel",
    "map x_map, map weight_map, map q_map, ptr bias, ptr positions, ptr token_slots, "
    "ptr block_tables, ptr inv_freq, ptr q, ptr kv_cache, i32 M, i32 N, i32 K, i32 q_stride, "
    "i64 block_stride, i32 num_heads, i32 num_kv_heads, i32 block_shift, i32 max_blocks, i32 group",
    arch="sm_90a",
    pdl=True,
)
MATMUL_FEW_ROWS = Kernel(
    "matmul_few_rows.cu",
    "matmul_few_rows_kernel",
    "ptr x, ptr weight, ptr bias, ptr norm_weight, ptr residual, ptr y, i32 M, i32 N, i32 K, "
    "i32 x_stride, i32 residual_stride, i32 y_stride, f32 eps",
    pdl=True,
)


class Choice(NamedTuple):
    """How a product is launched; `template` lacks the element types before and silu after it."""

    kernel: Kernel
    template: tuple[int, ...]
    blocks: int
    threads: int
    smem: int
    split: int = 1
    pdl: bool = True
    cluster: int = 1
    boxes: tuple[int, int] = (0, 0)  # rows of x and of weight in a copy by TMA
    piece: int = 0  # columns of y in one
    group: int = 16  # tiles along M that are worked on before the next column of tiles
