"""`tinyvllm bench attention`: decode attention alone, next to plain reads of the same pages."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinyvllm.bench.synthetic import KV_SCALE, decode_dims
from tinyvllm.bench.timing import captured, replay_seconds
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import Device, Stream, cuda_unavailable
from tinyvllm.driver.kernel import KernelLoader, PreparedLaunch
from tinyvllm.driver.spec import Kernel, Launch
from tinyvllm.memory.array import DeviceArray
from tinyvllm.memory.pool import DevicePool
from tinyvllm.ops.cuda_executor import CudaExecutor
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.ops.random_fill import fill_launches
from tinyvllm.util import DType, InputError, ceil_div

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
    if reason := cuda_unavailable():
        raise InputError(f"bench attention needs a GPU: {reason}")
    index = int(config.device.partition(":")[2] or 0)
    dtype = DType.BF16 if config.dtype == "auto" else DType(config.dtype)
    rows = []
    with Device(index, config.kernel_path) as device:
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


class AttentionBench(ExitStack):
    """A KV cache for one shape of attention, full of random values; frees everything at exit."""

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
        super().__init__()
        self._device, self._shape = device, (head_dim, group, batch, context)
        table_len = ceil_div(context, block_size)
        pages = batch * table_len
        program = attention_program(head_dim, group, block_size)
        self._dims = decode_dims(batch, context)
        limits = {**self._dims, "SLOTS": batch, "MB": table_len, "NB": pages}
        with ExitStack() as opened:
            self._stream = opened.enter_context(Stream())
            loader = opened.enter_context(KernelLoader(device))
            pool = opened.enter_context(DevicePool(device, device.mem_info()[0]))
            self._executor = CudaExecutor(
                [program],
                {},
                limits,
                act=dtype,
                info=device.info,
                pool=pool,
                loader=loader,
                stream=self._stream,
            )
            opened.callback(self._executor.close)
            self._fill(np.random.default_rng(0), batch, context, pages)
            self.push(opened.pop_all())

    def measure(self) -> AttentionTime:
        """Runs it all once, then times attention and the reads."""
        head_dim, group, batch, context = self._shape
        by_op = self._executor.launches_by_op("attention", self._dims)
        seconds = self._seconds([launch for _, launches in by_op for launch in launches])
        reads = self._seconds(self._executor.prepare(self._reads()))
        kv = self._executor.array("kv_cache")
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

    def _fill(self, rng: np.random.Generator, batch: int, context: int, pages: int) -> None:
        executor = self._executor
        kv: DeviceArray = executor.array("kv_cache")
        page_len = math.prod(kv.shape[1:])
        executor.launch(
            fill_launches(
                kv.ptr,
                kv.dtype,
                key=1,
                base=0.0,
                scale=KV_SCALE,
                num_rows=pages,
                row_len=page_len,
            )
        )
        tables = rng.permutation(pages).astype(np.int32).reshape(1, batch, -1)
        executor.write_state("block_tables", tables)
        qkv = executor.array("qkv")
        executor.write_state("qkv", rng.standard_normal(qkv.shape, np.float32))
        rows = np.arange(batch)
        inputs = {
            "query_start": np.arange(batch + 1),
            "batch_slots": rows,
            "token_slots": rows,
            "seq_lens": np.full(batch, context),
            "positions": np.full(batch, context - 1),
        }
        inputs = {name: values.astype(np.int32) for name, values in inputs.items()}
        executor.run("attention", self._dims, inputs, ()).discard()

    def _reads(self) -> list[Launch]:
        """Of each layer: the same pages in the order of the block tables."""
        kv, tables = self._executor.array("kv_cache"), self._executor.array("block_tables")
        layer_bytes = math.prod(kv.shape[2:]) * kv.dtype.itemsize
        return [
            READ_PAGES().launch(
                (self._device.info.num_sms * READ_BLOCKS_PER_SM,),
                READ_THREADS,
                base=kv.ptr + layer * layer_bytes,
                pages=tables.ptr,
                out=self._executor.buffers.arena,
                num_pages=kv.shape[0],
                page_bytes=layer_bytes,
                page_stride=LAYERS * layer_bytes,
                impossible=IMPOSSIBLE,
            )
            for layer in range(LAYERS)
        ]

    def _seconds(self, launches: list[PreparedLaunch]) -> float:
        """Of one launch, when the layers follow each other."""
        with captured(launches * REPEATS, self._stream) as graph:
            return replay_seconds(graph, self._stream, REPLAYS) / len(launches) / REPEATS
