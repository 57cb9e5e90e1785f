"""`tinyvllm bench attention --phase prefill`: causal attention of whole prompts alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinyvllm.bench.attention import GROUPS, HEAD_DIMS, KV_HEADS, PagedBench
from tinyvllm.bench.op_bench import opened_device
from tinyvllm.bench.rivals import Rival, Seconds, in_turns, load_rival
from tinyvllm.bench.synthetic import check_steps, prefill_dims
from tinyvllm.config import EngineConfig
from tinyvllm.driver.device import Device
from tinyvllm.ops.program import INPUT, OUTPUT, STATE, Program
from tinyvllm.util import DType, ceil_div

REPEATS = 4  # in a graph
ROUNDS, REPLAYS = 9, 3


@dataclass(frozen=True)
class PrefillAttentionTime:
    """Attention of `batch` prompts of `length` tokens; `rival_*`: by a rival, if there is one.

    Operations are those of the scores that causality leaves: half of all.
    """

    head_dim: int
    group: int  # query heads of a KV head
    batch: int
    length: int
    us: float
    tflops: float
    rival_us: float | None = None
    rival_tflops: float | None = None


def bench_attention_prefill(
    config: EngineConfig,
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    rival: str | None,
    as_json: bool,
) -> None:
    """Times attention of whole prompts, K and V in blocks in random order, for both head sizes and
    1 to 8 query heads a KV head; with a `rival`, the path of a file, in turns with it on the same
    arrays."""
    check_steps(batches, lengths)
    rows = []
    with opened_device(config, "bench attention") as (device, dtype):
        other = load_rival(rival, device.index) if rival else None
        if not as_json:
            print(f"{device.info.name}, {dtype.value}, blocks of {config.block_size} tokens")
            head = (
                f"{'head_dim':>8} {'group':>6} {'batch':>6} {'length':>7} {'us':>9} {'TFLOP/s':>8}"
            )
            print(f"{head} {'rival us':>9} {'TFLOP/s':>8} {'times':>6}" if rival else head)
        for batch, length in itertools.product(batches, lengths):
            for head_dim, group in itertools.product(HEAD_DIMS, GROUPS):
                with PrefillAttentionBench(
                    device, dtype, config.block_size, head_dim, group, batch, length
                ) as bench:
                    rows.append(bench.measure(other))
                if not as_json:
                    print(_line(rows[-1]), flush=True)
        if as_json:
            print(json.dumps({"device": device.info.name, "rows": [asdict(r) for r in rows]}))


def prefill_program(head_dim: int, group: int, block_size: int) -> Program:
    """Attention of one layer; K and V of the prompts are in the cache."""
    p = Program("attention")
    width = KV_HEADS * group * head_dim
    for name, size in (("query_start", "R1"), ("batch_slots", "R"), ("seq_lens", "R")):
        p.buffer(name, (size,), DType.I32, INPUT)
    p.buffer("block_tables", (1, "SLOTS", "MB"), DType.I32, STATE)
    p.buffer("kv_cache", ("NB", 1, 2, KV_HEADS, block_size, head_dim), None, STATE)
    p.buffer("q", ("T", width), None, STATE)
    p.buffer("y", ("T", width), None, OUTPUT)
    same: dict[str, Any] = {name: name for name in p.buffers}
    p.emit("attention", layer=0, group=0, scale=head_dim**-0.5, **same)
    return p


class PrefillAttentionBench(PagedBench):
    """Prompts of one length and heads of one shape; frees everything at exit."""

    def __init__(
        self,
        device: Device,
        dtype: DType,
        block_size: int,
        head_dim: int,
        group: int,
        batch: int,
        length: int,
    ) -> None:
        self._shape = (head_dim, group, batch, length)
        program = prefill_program(head_dim, group, block_size)
        dims = prefill_dims(batch, length)
        super().__init__(device, program, dims, dtype, batch, ceil_div(length, block_size))
        self.fill("q")
        self.run(
            {
                "query_start": np.arange(batch + 1) * length,
                "batch_slots": np.arange(batch),
                "seq_lens": np.full(batch, length),
            }
        )

    def measure(self, rival: Rival | None) -> PrefillAttentionTime:
        """The time of one launch, and of cuDNN's."""
        head_dim, group, batch, length = self._shape
        launches = self.launches() * REPEATS
        graph = self.graph(launches)
        runs: list[Seconds] = [lambda: self.seconds(graph, REPLAYS) / len(launches)]
        if rival:
            q, cache, tables = map(self.executor.array, ("q", "kv_cache", "block_tables"))
            runs.append(rival.attention(q, cache, tables, length, REPEATS, REPLAYS))
        times = in_turns(runs, ROUNDS)
        flops = 2 * batch * length**2 * KV_HEADS * group * head_dim
        rates = [flops / seconds / 1e12 for seconds in times]
        return PrefillAttentionTime(
            head_dim,
            group,
            batch,
            length,
            us=times[0] * 1e6,
            tflops=rates[0],
            rival_us=times[1] * 1e6 if rival else None,
            rival_tflops=rates[1] if rival else None,
        )


def _line(row: PrefillAttentionTime) -> str:
    line = (
        f"{row.head_dim:>8} {row.group:>6} {row.batch:>6} {row.length:>7} {row.us:>9.2f} "
        f"{row.tflops:>8.1f}"
    )
    if row.rival_us is not None and row.rival_tflops is not None:
        line += f" {row.rival_us:>9.2f} {row.rival_tflops:>8.1f} {row.rival_us / row.us:>6.3f}"
    return line
