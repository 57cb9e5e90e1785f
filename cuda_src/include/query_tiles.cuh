// The tiles of queries of a launch of prefill attention, in the order in which blocks take them.
#pragma once

#include "common.cuh"

struct QueryTile {
  int token;     // of q: the first query
  int queries;   // up to the tile's size; 0: there is no tile
  int position;  // of the first query in its sequence
  int head;
  int length, slot;  // of the row

  // Keys from 0 on that some query sees.
  __device__ __forceinline__ int num_keys() const { return position + queries; }
};

// Tiles by row, then last queries (longest contexts) first, then head: blocks that work at the same
// time share keys and values, and a launch ends with short tiles. The lanes of the calling warp
// count the tiles of 32 rows at a time; indices must be asked for in ascending order.
template <int QUERIES> struct QueryTiles {
  const i32 *query_start, *batch_slots, *seq_lens;
  int rows, heads;
  int window;  // the row of lane 0
  int before;  // tiles of the rows before it
  int upto;    // tiles of all rows up to this lane's

  __device__ __forceinline__ QueryTiles(const i32* query_start, const i32* batch_slots,
                                        const i32* seq_lens, int rows, int heads)
      : query_start(query_start),
        batch_slots(batch_slots),
        seq_lens(seq_lens),
        rows(rows),
        heads(heads) {
    count_from(0, 0);
  }

  __device__ __forceinline__ void count_from(int row, int tiles) {
    window = row;
    before = tiles;
    const int lane = threadIdx.x % kWarpSize;
    row += lane;
    upto = row < rows ? ceil_div(query_start[row + 1] - query_start[row], QUERIES) * heads : 0;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, upto, offset);
      if (lane >= offset) upto += other;
    }
    upto += before;
  }

  __device__ __forceinline__ QueryTile find(int index) {
    for (int all = last(); index >= all; all = last()) {
      if (window + kWarpSize >= rows) return {};
      count_from(window + kWarpSize, all);
    }
    const int owner = __ffs(__ballot_sync(kFullMask, index < upto)) - 1;
    const int previous = __shfl_sync(kFullMask, upto, max(owner - 1, 0));
    index -= owner == 0 ? before : previous;
    const int row = window + owner, start = query_start[row];
    const int queries = query_start[row + 1] - start, length = seq_lens[row];
    const int first = (ceil_div(queries, QUERIES) - 1 - index / heads) * QUERIES;
    return {start + first,  min(QUERIES, queries - first), length - queries + first,
            index % heads, length, batch_slots[row]};
  }

  __device__ __forceinline__ int last() const {
    return __shfl_sync(kFullMask, upto, kWarpSize - 1);
  }
};
