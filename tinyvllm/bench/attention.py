"""`tinyvllm bench attention`: decode attention alone, next to plain reads of the same pages."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinyvllm.bench.op_bench import OpBench, opened_device
from tinyvllm.bench.synthetic import check_steps, decode_dims
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import Device
from tinyvllm.driver.kernel import PreparedLaunch
from tinyvllm.driver.spec import Kernel, Launch
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.util import DType, ceil_div

READ_PAGES = Kernel(
    "read_pages.cu",
    "read_pages_kernel",
    "ptr base, ptr pages, ptr out, i32 num_pages, i32 page_bytes, i64 page_stride, u32 impossible",
)
READ_THREADS = 256
READ_BLOCKS_PER_SM = 8
IMPOSSIBLE = 1  # the bits of random keys and values, combined, are more

KV_HEADS = 8
LAYERS = 4  # taken in turn: K and V come from memory, not from a cache
REPEATS, REPLAYS = 4, 15  # of the layers in a graph, of the graph
HEAD_DIMS, GROUPS = (64, 128), (1, 3, 4, 8)


@dataclass(frozen=True)
class AttentionTime:
    """One kernel at one shape: `share` is its rate as a part of that of plain reads."""

    head_dim: int
    group: int  # query heads of a KV head
    batch: int
    context: int
    us: float
    tb_per_s: float  # of keys and values
    read_tb_per_s: float  # of plain reads of the same pages
    share: float


def bench_attention(
    config: EngineConfig, batches: Sequence[int], contexts: Sequence[int], *, as_json: bool
) -> None:
    """Times decode attention for both head sizes and 1 to 8 query heads a KV head.

    Every row has a context of its own, its blocks in random order.
    """
    check_steps(batches, contexts)
    rows = []
    with opened_device(config, "bench attention") as (device, dtype):
        if not as_json:
            print(
                f"{device.info.name}, blocks of {config.block_size} tokens\n{'head_dim':>8} "
                f"{'group':>6} {'batch':>6} {'context':>8} {'us':>8} {'TB/s':>6} {'reads':>6} "
                f"{'share':>6}"
            )
        for batch, context in itertools.product(batches, contexts):
            for head_dim, group in itertools.product(HEAD_DIMS, GROUPS):
                with AttentionBench(
                    device, dtype, config.block_size, head_dim, group, batch, context
                ) as bench:
                    rows.append(bench.measure())
                if not as_json:
                    _print_row(rows[-1])
        if as_json:
            print(json.dumps({"device": device.info.name, "rows": [asdict(r) for r in rows]}))


def _print_row(row: AttentionTime) -> None:
    print(
        f"{row.head_dim:>8} {row.group:>6} {row.batch:>6} {row.context:>8} {row.us:>8.2f} "
        f"{row.tb_per_s:>6.2f} {row.read_tb_per_s:>6.2f} {row.share:>6.1%}",
        flush=True,
    )


def attention_program(head_dim: int, group: int, block_size: int) -> Program:
    """The fused decode attention of each of LAYERS layers."""
    p = Program("attention")
    width = KV_HEADS * group * head_dim
    for name, size in (
        ("query_start", "R1"),
        ("batch_slots", "R"),
        ("seq_lens", "R"),
        ("positions", "T"),
        ("token_slots", "T"),
    ):
        p.buffer(name, (size,), DType.I32, INPUT)
    p.buffer("block_tables", (1, "SLOTS", "MB"), DType.I32, STATE)
    p.buffer("kv_cache", ("NB", LAYERS, 2, KV_HEADS, block_size, head_dim), None, STATE)
    p.buffer("qkv", ("T", width + 2 * KV_HEADS * head_dim), None, STATE)
    p.constant("inv_freq", (10000.0 ** -np.linspace(0, 1, head_dim // 2)).astype(np.float32))
    p.buffer("y", ("T", width), None, OUTPUT)
    same: dict[str, Any] = {name: name for name in p.buffers}
    for layer in range(LAYERS):
        p.emit(
            "rope_attention",
            inv_freq="inv_freq",
            layer=layer,
            group=0,
            scale=head_dim**-0.5,
            **same,
        )
    return p


class PagedBench(OpBench):
    """A KV cache of random values whose blocks are `rows` sequences' in random order.

    `dims` has the sizes of a step; the program has the states `kv_cache` and `block_tables`.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        dims: Mapping[str, int],
        dtype: DType,
        rows: int,
        table_len: int,
    ) -> None:
        pages = rows * table_len
        super().__init__(
            device, program, {**dims, "SLOTS": rows, "MB": table_len, "NB": pages}, dtype
        )
        self.fill("kv_cache")
        tables = np.random.default_rng(0).permutation(pages).astype(np.int32)
        self.executor.write_state("block_tables", tables.reshape(1, rows, table_len))

    def run(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Runs the program once: its inputs stay on the device."""
        inputs = {name: values.astype(np.int32) for name, values in inputs.items()}
        self.executor.run(self.program, self.dims, inputs, ()).discard()


class AttentionBench(PagedBench):
    """Decode attention of one shape; frees everything at exit."""

    def __init__(
        self,
        device: Device,
        dtype: DType,
        block_size: int,
        head_dim: int,
        group: int,
        batch: int,
        context: int,
    ) -> None:
        self._shape = (head_dim, group, batch, context)
        program = attention_program(head_dim, group, block_size)
        dims = decode_dims(batch, context)
        super().__init__(device, program, dims, dtype, batch, ceil_div(context, block_size))
        self.fill("qkv")
        rows = np.arange(batch)
        self.run(
            {
                "query_start": np.arange(batch + 1),
                "batch_slots": rows,
                "token_slots": rows,
                "seq_lens": np.full(batch, context),
                "positions": np.full(batch, context - 1),
            }
        )

    def measure(self) -> AttentionTime:
        """Runs it all once, then times attention and the reads."""
        head_dim, group, batch, context = self._shape
        seconds = self._launch_seconds(self.launches())
        reads = self._launch_seconds(self.executor.prepare(self._reads()))
        kv = self.executor.array("kv_cache")
        num_bytes = batch * context * 2 * KV_HEADS * head_dim * kv.dtype.itemsize
        read_rate = kv.nbytes / LAYERS / reads
        rate = num_bytes / seconds
        return AttentionTime(
            head_dim,
            group,
            batch,
            context,
            us=seconds * 1e6,
            tb_per_s=rate / 1e12,
            read_tb_per_s=read_rate / 1e12,
            share=rate / read_rate,
        )

    def _reads(self) -> list[Launch]:
        """Of each layer: the same pages in the order of the block tables."""
        kv, tables = self.executor.array("kv_cache"), self.executor.array("block_tables")
        layer_bytes = math.prod(kv.shape[2:]) * kv.dtype.itemsize
        return [
            READ_PAGES().launch(
                (self.device.info.num_sms * READ_BLOCKS_PER_SM,),
                READ_THREADS,
                base=kv.ptr + layer * layer_bytes,
                pages=tables.ptr,
                out=self.executor.buffers.arena,
                num_pages=kv.shape[0],
                page_bytes=layer_bytes,
                page_stride=LAYERS * layer_bytes,
                impossible=IMPOSSIBLE,
            )
            for layer in range(LAYERS)
        ]

    def _launch_seconds(self, launches: list[PreparedLaunch]) -> float:
        """Of one launch, when the layers follow each other."""
        graph = self.graph(launches * REPEATS)
        return self.seconds(graph, REPLAYS) / len(launches) / REPEATS
