"""Copies whole blocks of the KV cache, for sequences that part inside of a shared block."""

from __future__ import annotations

from math import prod

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.util import ceil_div

COPY_BLOCKS = Kernel(
    "copy_blocks.cu",
    "copy_blocks_kernel",
    "ptr block_copies, ptr kv_cache, i64 block_vectors",
    pdl=True,
)
# Constants of copy_blocks.cu.
THREADS = 256
VECTORS_PER_BLOCK = THREADS * 4
VECTOR_BYTES = 16


class CopyBlocks(OpDef):
    """kv_cache[dst] = kv_cache[src] for each [src, dst] of `block_copies`, all layers at once.

    No dst is another copy's src or dst.
    """

    name = "copy_blocks"
    reads = {"block_copies": ("CP", 2)}
    writes = {"kv_cache": ("NB", "L", 2, "HKV", "BS", "D")}

    def reference(self, a: Operands) -> None:
        for src, dst in np.asarray(a.block_copies).tolist():
            a.kv_cache[dst] = a.kv_cache[src]

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        num_copies = a.block_copies.shape[0]
        if num_copies == 0:
            return []
        block_bytes = prod(a.kv_cache.shape[1:]) * a.act.itemsize
        assert block_bytes % VECTOR_BYTES == 0, f"a block of {block_bytes} bytes"
        vectors = block_bytes // VECTOR_BYTES
        return [
            COPY_BLOCKS().launch(
                (ceil_div(vectors, VECTORS_PER_BLOCK), num_copies),
                THREADS,
                block_copies=a.block_copies.ptr,
                kv_cache=a.kv_cache.ptr,
                block_vectors=vectors,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        block_bytes = prod(a.kv_cache.shape[1:]) * a.act.itemsize
        return Cost(a.block_copies.shape[0] * (2 * block_bytes + 8))
