// How decode attention divides its work: partitions of contexts, and a piece of their list for
// each block.
#pragma once

#include "common.cuh"

constexpr int kMinPartition = 256;  // tokens; as in tinyvllm/ops/attention.py
constexpr int kMaxPartitions = 64;

// Tokens per partition of a context: the least power of two of which kMaxPartitions suffice.
__device__ __forceinline__ int partition_length(int length) {
  const int least = max(length - 1, 0) / (kMinPartition * kMaxPartitions);
  return kMinPartition << (32 - __clz(least));
}

// A row of length 0 has one as well, without tokens: its output is written like any other.
__device__ __forceinline__ int num_partitions(int length) {
  return max(1, ceil_div(length, partition_length(length)));
}

// A place in the list of partitions, by row, head block and place in the context.
struct Place {
  int index;  // in the list
  int row, head_block, part;
  int length, slot;  // of the row

  __device__ __forceinline__ int parts() const { return num_partitions(length); }

  __device__ __forceinline__ int first_token() const { return part * partition_length(length); }

  __device__ __forceinline__ int end() const {
    return min((part + 1) * partition_length(length), length);
  }
};

// The rows of a launch, and the piece of their list that is this block's: from `first` to before
// the place with index `end`. Every warp finds it by itself, its lanes having as many neighbouring
// rows each.
struct Work {
  const i32* seq_lens;
  const i32* batch_slots;
  int head_blocks;
  int total, end;
  Place first;

  __device__ __forceinline__ Work(int rows, int head_blocks, const i32* seq_lens,
                                  const i32* batch_slots)
      : seq_lens(seq_lens), batch_slots(batch_slots), head_blocks(head_blocks) {
    const int lane = threadIdx.x % kWarpSize, share = ceil_div(rows, kWarpSize);
    const int from = min(lane * share, rows), to = min(from + share, rows);
    int own = 0;
    for (int r = from; r < to; r++) own += num_partitions(seq_lens[r]);
    int upto = own;  // of all rows up to this lane's last
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int before = __shfl_up_sync(kFullMask, upto, offset);
      if (lane >= offset) upto += before;
    }
    total = __shfl_sync(kFullMask, upto, kWarpSize - 1) * head_blocks;
    first.index = piece_begin(blockIdx.x);
    end = piece_begin(blockIdx.x + 1);
    if (first.index == end) return;
    const bool here = first.index < upto * head_blocks;
    const int owner = __ffs(__ballot_sync(kFullMask, here)) - 1;  // the first such lane
    int row = from, rest = first.index - (upto - own) * head_blocks;
    if (lane == owner) {
      for (; true; row++) {
        const int count = num_partitions(seq_lens[row]) * head_blocks;
        if (rest < count) break;
        rest -= count;
      }
    }
    rest = __shfl_sync(kFullMask, rest, owner);
    load_row(first, __shfl_sync(kFullMask, row, owner));
    first.head_block = rest / first.parts();
    first.part = rest % first.parts();
  }

  __device__ __forceinline__ int piece_begin(int block) const {
    return static_cast<int>(static_cast<i64>(block) * total / gridDim.x);
  }

  // The block whose piece has the partition with this index.
  __device__ __forceinline__ int owner(int index) const {
    return static_cast<int>((static_cast<i64>(index + 1) * gridDim.x - 1) / total);
  }

  __device__ __forceinline__ void load_row(Place& at, int row) const {
    at.row = row;
    at.length = seq_lens[row];
    at.slot = batch_slots[row];
  }

  // Moves to the next partition; beyond the block's piece only the index is right.
  __device__ __forceinline__ void advance(Place& at) const {
    if (++at.index == end || ++at.part < at.parts()) return;
    at.part = 0;
    if (++at.head_block < head_blocks) return;
    at.head_block = 0;
    load_row(at, at.row + 1);
  }
};
