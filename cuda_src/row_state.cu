// The row state: what the device knows of each running sequence, by slot, between steps.
//
// row_params[slot]    as the host has set it (row_params.cuh)
// row_position[slot]  place in the sequence of the next token to be computed
// row_token[slot]     that token, where the device has sampled it itself
// block_tables[group, slot, index]
//
// A row with slot -1 is padding: its length and positions are 0, and it changes no state.
//
// apply_edits takes over what the host has changed, step_inputs spreads the rows of a step over
// its tokens, advance_rows moves the rows on. Work: one thread per edit, token or row. A few
// kilobytes: only the launches cost.
#include "row_params.cuh"

// row_edits [num_row_edits]; block_edits [num_block_edits, 4]: group, slot, index, block. Only the
// first edit_counts[0] and [1] are valid. No two edits of a step touch the same place.
__global__ void __launch_bounds__(256)
    apply_edits_kernel(const i32* edit_counts, const RowParams* row_edits, const i32* block_edits,
                       RowParams* row_params, i32* row_position, i32* row_token, i32* block_tables,
                       i32 num_row_edits, i32 num_block_edits, i32 num_slots, i32 table_len) {
  start_next();
  wait_for_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < min(edit_counts[0], num_row_edits)) {
    const RowParams edit = row_edits[i];
    row_params[edit.slot] = edit;
    row_position[edit.slot] = edit.position;
    row_token[edit.slot] = edit.token;
  }
  if (i < min(edit_counts[1], num_block_edits)) {
    const i32* edit = block_edits + i * 4;
    const i64 row = static_cast<i64>(edit[0]) * num_slots + edit[1];
    block_tables[row * table_len + edit[2]] = edit[3];
  }
}

// Row r of the step has the tokens query_start[r] ... query_start[r + 1] - 1, which continue its
// sequence. prompt_ids[t] is the token's id, or -1 for the one that the row state holds.
// The first num_decode rows have one token each. sample_rows [num_samples]: the rows after whose
// last token one is sampled.
__global__ void __launch_bounds__(256)
    step_inputs_kernel(const i32* batch_slots, const i32* query_start, const i32* prompt_ids,
                       const i32* sample_rows, const i32* row_position, const i32* row_token,
                       i32* token_ids, i32* positions, i32* token_slots, i32* seq_lens,
                       i32* sample_index, i32* sample_slots, i32* sample_positions, i32 num_tokens,
                       i32 num_rows, i32 num_decode, i32 num_samples) {
  start_next();
  wait_for_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < num_tokens) {
    // query_start[row] <= i < query_start[end]
    int row = min(i, num_decode), end = i < num_decode ? i + 1 : num_rows;
    while (end - row > 1) {
      const int middle = (row + end) / 2;
      if (query_start[middle] <= i) {
        row = middle;
      } else {
        end = middle;
      }
    }
    const i32 slot = batch_slots[row];
    token_slots[i] = slot;
    const bool real = slot >= 0;
    positions[i] = real ? row_position[slot] + i - query_start[row] : 0;
    token_ids[i] = !real ? 0 : prompt_ids[i] >= 0 ? prompt_ids[i] : row_token[slot];
  }
  if (i < num_rows) {
    const i32 slot = batch_slots[i];
    seq_lens[i] = slot >= 0 ? row_position[slot] + query_start[i + 1] - query_start[i] : 0;
  }
  if (i < num_samples) {
    const i32 row = sample_rows[i], slot = batch_slots[row];
    const i32 end = query_start[row + 1];
    sample_index[i] = end - 1;
    sample_slots[i] = slot;
    sample_positions[i] = slot >= 0 ? row_position[slot] + end - query_start[row] : 0;
  }
}

__global__ void __launch_bounds__(256)
    advance_rows_kernel(const i32* batch_slots, const i32* seq_lens, const i32* sample_slots,
                        const i32* tokens, i32* row_position, i32* row_token, i32 num_rows,
                        i32 num_samples) {
  start_next();
  wait_for_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < num_rows && batch_slots[i] >= 0) row_position[batch_slots[i]] = seq_lens[i];
  if (i < num_samples && sample_slots[i] >= 0) row_token[sample_slots[i]] = tokens[i];
}
