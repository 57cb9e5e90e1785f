"""How much KV memory stays empty at a block size, on the engine's own scheduler without a device.

The waste is internal fragmentation over the lives of all requests: empty token places of blocks
in use over all places of blocks in use, both summed over the steps. Between blocks nothing is lost,
since any free block serves any request.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm.bench.lengths import Lengths
from tinyvllm.config import EngineConfig
from tinyvllm.engine.request import Request
from tinyvllm.engine.scheduler import Scheduler
from tinyvllm.engine.stats import empty_slots
from tinyvllm.memory.blocks import BlockManager
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import ceil_div


@dataclass(frozen=True)
class Waste:
    """What a block size costs, for requests that are scheduled as the engine would."""

    block_size: int
    waste: float  # share of the token places in use that are empty, averaged over time
    peak_blocks: int
    table_entries: int  # of a sequence of max_model_len tokens
    table_bytes: int  # of the device's table of max_num_seqs rows


def simulate_waste(
    lengths: list[Lengths], block_size: int, *, max_num_seqs: int, max_num_batched_tokens: int
) -> Waste:
    """Schedules all requests, queued at once, step by step to their ends, and counts."""
    max_model_len = max(map(sum, lengths))
    entries = ceil_div(max_model_len, block_size)
    blocks = BlockManager(entries * min(max_num_seqs, len(lengths)), block_size)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        preemption_threshold=1.0,
        enable_prefix_caching=False,  # each prompt stands for another text
    )
    scheduler = Scheduler(config, blocks, max_model_len, vocab_size=1)
    for i, request in enumerate(lengths):
        params = SamplingParams(max_tokens=request.output_len, ignore_eos=True)
        scheduler.add(Request(str(i), [0] * request.input_len, params))
    empty = places = peak = 0
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        assert step is not None
        empty += empty_slots(blocks, scheduler.running)
        places += blocks.num_used * block_size
        peak = max(peak, blocks.num_used)
        scheduler.update(step, [0] * len(step.sampling_rows))
    return Waste(block_size, empty / places, peak, entries, 4 * entries * max_num_seqs)
