"""Ops on the state of running sequences: the host's edits, a step's inputs, the rows' advance."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.util import DType, ceil_div

APPLY_EDITS = Kernel(
    "row_state.cu",
    "apply_edits_kernel",
    "ptr edit_counts, ptr row_edits, ptr block_edits, ptr row_position, ptr row_token, "
    "ptr row_temperature, ptr row_seed, ptr block_tables, i32 num_row_edits, "
    "i32 num_block_edits, i32 num_slots, i32 table_len",
)
STEP_INPUTS = Kernel(
    "row_state.cu",
    "step_inputs_kernel",
    "ptr batch_slots, ptr query_start, ptr prompt_ids, ptr sample_rows, ptr row_position, "
    "ptr row_token, ptr token_ids, ptr positions, ptr token_slots, ptr seq_lens, "
    "ptr sample_index, ptr sample_slots, ptr sample_positions, i32 num_tokens, i32 num_rows, "
    "i32 num_samples",
)
ADVANCE_ROWS = Kernel(
    "row_state.cu",
    "advance_rows_kernel",
    "ptr batch_slots, ptr seq_lens, ptr sample_slots, ptr tokens, ptr row_position, "
    "ptr row_token, i32 num_rows, i32 num_samples",
)
THREADS = 256


class ApplyEdits(OpDef):
    """Takes over what the host has changed in rows and block tables.

    A row edit is [slot, position, token, bits of the float32 temperature, seed low, seed high,
    0, 0], a block edit [group, slot, index, block]. The first `edit_counts` of each are valid,
    and no two touch the same place.
    """

    name = "apply_edits"
    reads = {"edit_counts": (2,), "row_edits": ("E", 8), "block_edits": ("B", 4)}
    writes = {
        "row_position": ("SLOTS",),
        "row_token": ("SLOTS",),
        "row_temperature": ("SLOTS",),
        "row_seed": ("SLOTS", 2),
        "block_tables": ("G", "SLOTS", "MB"),
    }
    out_dtypes = {
        "row_position": DType.I32,
        "row_token": DType.I32,
        "row_temperature": DType.F32,
        "row_seed": DType.I32,
        "block_tables": DType.I32,
    }

    def reference(self, a: Operands) -> None:
        rows = a.row_edits[: a.edit_counts[0]]
        slots = rows[:, 0]
        a.row_position[slots] = rows[:, 1]
        a.row_token[slots] = rows[:, 2]
        a.row_temperature[slots] = rows[:, 3].copy().view(np.float32)
        a.row_seed[slots] = rows[:, 4:6]
        blocks = a.block_edits[: a.edit_counts[1]]
        a.block_tables[blocks[:, 0], blocks[:, 1], blocks[:, 2]] = blocks[:, 3]

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        num_row_edits, num_block_edits = a.row_edits.shape[0], a.block_edits.shape[0]
        threads = max(num_row_edits, num_block_edits)
        if threads == 0:
            return []
        return [
            APPLY_EDITS().launch(
                (ceil_div(threads, THREADS),),
                THREADS,
                edit_counts=a.edit_counts.ptr,
                row_edits=a.row_edits.ptr,
                block_edits=a.block_edits.ptr,
                row_position=a.row_position.ptr,
                row_token=a.row_token.ptr,
                row_temperature=a.row_temperature.ptr,
                row_seed=a.row_seed.ptr,
                block_tables=a.block_tables.ptr,
                num_row_edits=num_row_edits,
                num_block_edits=num_block_edits,
                num_slots=a.block_tables.shape[1],
                table_len=a.block_tables.shape[2],
            )
        ]

    def cost(self, a: Operands) -> Cost:
        return Cost(nbytes(a.edit_counts))  # how many edits there are is not known from shapes


class StepInputs(OpDef):
    """Spreads the rows of a step over its tokens.

    Row r continues the sequence of slot batch_slots[r] with the tokens query_start[r] ...
    query_start[r + 1] - 1. `prompt_ids` holds a token's id, or -1 for the token of the row state.
    After the last token of each of `sample_rows` a token is sampled.
    """

    name = "step_inputs"
    reads = {
        "batch_slots": ("R",),
        "query_start": ("R1",),
        "prompt_ids": ("T",),
        "sample_rows": ("S",),
        "row_position": ("SLOTS",),
        "row_token": ("SLOTS",),
    }
    writes = {
        "token_ids": ("T",),
        "positions": ("T",),
        "token_slots": ("T",),
        "seq_lens": ("R",),
        "sample_index": ("S",),
        "sample_slots": ("S",),
        "sample_positions": ("S",),
    }
    out_dtypes = dict.fromkeys(writes, DType.I32)

    def reference(self, a: Operands) -> None:
        starts, lengths = a.query_start[:-1], np.diff(a.query_start)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        a.token_slots[...] = a.batch_slots[rows]
        a.positions[...] = a.row_position[a.token_slots] - starts[rows] + np.arange(len(rows))
        a.token_ids[...] = np.where(a.prompt_ids >= 0, a.prompt_ids, a.row_token[a.token_slots])
        a.seq_lens[...] = a.row_position[a.batch_slots] + lengths
        a.sample_index[...] = a.query_start[a.sample_rows + 1] - 1
        a.sample_slots[...] = a.batch_slots[a.sample_rows]
        a.sample_positions[...] = a.seq_lens[a.sample_rows]

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        num_tokens, num_rows = a.token_ids.shape[0], a.seq_lens.shape[0]
        num_samples = a.sample_index.shape[0]
        threads = max(num_tokens, num_rows, num_samples)
        if threads == 0:
            return []
        arrays = {name: getattr(a, name).ptr for name in (*self.reads, *self.writes)}
        return [
            STEP_INPUTS().launch(
                (ceil_div(threads, THREADS),),
                THREADS,
                **arrays,
                num_tokens=num_tokens,
                num_rows=num_rows,
                num_samples=num_samples,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        outputs = [getattr(a, name) for name in self.writes]
        return Cost(nbytes(a.batch_slots, a.query_start, a.prompt_ids, a.sample_rows, *outputs))


class AdvanceRows(OpDef):
    """Moves the rows of a step on: their new position, and the token that was sampled."""

    name = "advance_rows"
    reads = {
        "batch_slots": ("R",),
        "seq_lens": ("R",),
        "sample_slots": ("S",),
        "tokens": ("S",),
    }
    writes = {"row_position": ("SLOTS",), "row_token": ("SLOTS",)}
    out_dtypes = dict.fromkeys(writes, DType.I32)

    def reference(self, a: Operands) -> None:
        a.row_position[a.batch_slots] = a.seq_lens
        a.row_token[a.sample_slots] = a.tokens

    def launches(self, a: Operands, device: DeviceInfo) -> list[Launch]:
        num_rows, num_samples = a.seq_lens.shape[0], a.tokens.shape[0]
        threads = max(num_rows, num_samples)
        if threads == 0:
            return []
        arrays = {name: getattr(a, name).ptr for name in (*self.reads, *self.writes)}
        return [
            ADVANCE_ROWS().launch(
                (ceil_div(threads, THREADS),),
                THREADS,
                **arrays,
                num_rows=num_rows,
                num_samples=num_samples,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        read = nbytes(a.batch_slots, a.seq_lens, a.sample_slots, a.tokens)
        return Cost(read + nbytes(a.seq_lens, a.tokens))
