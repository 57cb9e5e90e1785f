"""Ops on the state of running sequences: the host's edits, a step's inputs, the rows' advance."""

from __future__ import annotations

import numpy as np

from tinyvllm.driver.spec import DeviceInfo, Kernel, Launch
from tinyvllm.ops.arrays import nbytes
from tinyvllm.ops.op import Cost, OpDef, Operands
from tinyvllm.ops.row_params import ROW_WORDS, as_row_params
from tinyvllm.util import DType, ceil_div

APPLY_EDITS = Kernel(
    "row_state.cu",
    "apply_edits_kernel",
    "ptr edit_counts, ptr row_edits, ptr block_edits, ptr row_params, ptr row_position, "
    "ptr row_token, ptr block_tables, i32 num_row_edits, i32 num_block_edits, i32 num_slots, "
    "i32 table_len",
    pdl=True,
)
STEP_INPUTS = Kernel(
    "row_state.cu",
    "step_inputs_kernel",
    "ptr batch_slots, ptr query_start, ptr prompt_ids, ptr sample_rows, ptr row_position, "
    "ptr row_token, ptr token_ids, ptr positions, ptr token_slots, ptr seq_lens, "
    "ptr sample_index, ptr sample_slots, ptr sample_positions, i32 num_tokens, i32 num_rows, "
    "i32 num_decode, i32 num_samples",
    pdl=True,
)
ADVANCE_ROWS = Kernel(
    "row_state.cu",
    "advance_rows_kernel",
    "ptr batch_slots, ptr seq_lens, ptr sample_slots, ptr tokens, ptr row_position, "
    "ptr row_token, i32 num_rows, i32 num_samples",
    pdl=True,
)
THREADS = 256
BLOCK_EDIT_WORDS = 4  # group, slot, index, block


class ApplyEdits(OpDef):
    """Takes over what the host has changed in rows and block tables.

    A row edit has the words of ROW_PARAMS, a block edit [group, slot, index, block]. The first
    `edit_counts` of each are valid, and no two touch the same place.
    """

    name = "apply_edits"
    reads = {
        "edit_counts": (2,),
        "row_edits": ("E", ROW_WORDS),
        "block_edits": ("B", BLOCK_EDIT_WORDS),
    }
    writes = {
        "row_params": ("SLOTS", ROW_WORDS),
        "row_position": ("SLOTS",),
        "row_token": ("SLOTS",),
        "block_tables": ("G", "SLOTS", "MB"),
    }
    out_dtypes = dict.fromkeys(writes, DType.I32)

    def reference(self, a: Operands) -> None:
        words = a.row_edits[: a.edit_counts[0]]
        rows = as_row_params(words)
        slots = rows["slot"]
        a.row_params[slots] = words
        a.row_position[slots] = rows["position"]
        a.row_token[slots] = rows["token"]
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
                row_params=a.row_params.ptr,
                row_position=a.row_position.ptr,
                row_token=a.row_token.ptr,
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
    query_start[r + 1] - 1; of `dims`, D is the number of leading rows with exactly one token.
    `prompt_ids` holds a token's id, or -1 for the token of the row state.
    After the last token of each of `sample_rows` a token is sampled. A row with slot -1 is padding:
    its tokens are 0 at position 0 of slot -1, its length is 0.
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
        real = a.token_slots >= 0
        slots = a.token_slots[real]
        offsets = np.arange(len(rows)) - starts[rows]
        a.positions[...] = 0
        a.positions[real] = a.row_position[slots] + offsets[real]
        given = a.prompt_ids[real]
        a.token_ids[...] = 0
        a.token_ids[real] = np.where(given >= 0, given, a.row_token[slots])
        real = a.batch_slots >= 0
        a.seq_lens[...] = 0
        a.seq_lens[real] = a.row_position[a.batch_slots[real]] + lengths[real]
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
                num_decode=a.dims["D"],
                num_samples=num_samples,
            )
        ]

    def cost(self, a: Operands) -> Cost:
        outputs = [getattr(a, name) for name in self.writes]
        return Cost(nbytes(a.batch_slots, a.query_start, a.prompt_ids, a.sample_rows, *outputs))


class AdvanceRows(OpDef):
    """Moves the rows of a step on: their new position, and the token that was sampled.

    Rows with slot -1 are skipped.
    """

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
        rows, samples = a.batch_slots >= 0, a.sample_slots >= 0
        a.row_position[a.batch_slots[rows]] = a.seq_lens[rows]
        a.row_token[a.sample_slots[samples]] = a.tokens[samples]

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
