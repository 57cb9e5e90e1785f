// How decode attention divides its work: partitions of contexts, and a piece of their list for
// each block.
#pragma once

#include "common.cuh"

constexpr int kMinPartition = 256;  // tokens
constexpr int kMinPartitionShift = 8;
static_assert(1 << kMinPartitionShift == kMinPartition);
constexpr int kMaxPartitions = 32;

// log2 of the tokens per partition of a context: the least of which kMaxPartitions suffice.
__device__ __forceinline__ int partition_shift(int length) {
  const u32 least = static_cast<u32>(max(length - 1, 0)) / (kMinPartition * kMaxPartitions);
  return kMinPartitionShift + 32 - __clz(least);
}

// A row of length 0 has one as well, without tokens: its output is written like any other.
__device__ __forceinline__ int num_partitions(int length) {
  return (max(length - 1, 0) >> partition_shift(length)) + 1;
}

// A place in the list of partitions, by row, head block and place in the context.
struct Place {
  int index;  // in the list
  int row, head_block, part;
  int length, slot;  // of the row

  __device__ __forceinline__ int parts() const { return num_partitions(length); }

  __device__ __forceinline__ int first_token() const { return part << partition_shift(length); }

  __device__ __forceinline__ int end() const {
    return min((part + 1) << partition_shift(length), length);
  }
};

// The rows of a launch, and the piece of their list that is this block's: from `first` to before
// the place with index `end`.
struct Work {
  const i32* seq_lens;
  const i32* batch_slots;
  int head_blocks;
  int share, longer;  // partitions of a block; so many blocks have one more
  int end;
  Place first;

  // With `whole`, block b has all partitions of row b / head_blocks and head block
  // b % head_blocks. Otherwise all blocks have as many partitions, or one less; every warp finds
  // its piece by itself, its lanes having as many neighbouring rows each.
  __device__ __forceinline__ Work(bool whole, int rows, int head_blocks, const i32* seq_lens,
                                  const i32* batch_slots)
      : seq_lens(seq_lens), batch_slots(batch_slots), head_blocks(head_blocks) {
    if (whole) {
      share = longer = first.index = first.part = 0;
      first.head_block = blockIdx.x % head_blocks;
      load_row(first, blockIdx.x / head_blocks);
      end = first.parts();
      return;
    }
    const int lane = threadIdx.x % kWarpSize, of_lane = ceil_div(rows, kWarpSize);
    const int from = min(lane * of_lane, rows), to = min(from + of_lane, rows);
    int own = 0;
#pragma unroll 1
    for (int r = from; r < to; r++) own += num_partitions(seq_lens[r]);
    int upto = own;  // of all rows up to this lane's last
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int before = __shfl_up_sync(kFullMask, upto, offset);
      if (lane >= offset) upto += before;
    }
    const u32 total = __shfl_sync(kFullMask, upto, kWarpSize - 1) * head_blocks;
    share = total / gridDim.x;
    longer = total % gridDim.x;
    first.index = piece_begin(blockIdx.x);
    end = piece_begin(blockIdx.x + 1);
    if (first.index == end) return;
    const bool here = first.index < upto * head_blocks;
    const int owner = __ffs(__ballot_sync(kFullMask, here)) - 1;  // the first such lane
    int row = from, rest = first.index - (upto - own) * head_blocks;
    if (lane == owner) {
#pragma unroll 1
      for (; true; row++) {
        const int count = num_partitions(seq_lens[row]) * head_blocks;
        if (rest < count) break;
        rest -= count;
      }
    }
    rest = __shfl_sync(kFullMask, rest, owner);
    load_row(first, __shfl_sync(kFullMask, row, owner));
    const u32 parts = first.parts();
    first.head_block = rest / parts;
    first.part = rest % parts;
  }

  __device__ __forceinline__ int piece_begin(int block) const {
    return block * share + min(block, longer);
  }

  // The block whose piece has the partition with this index.
  __device__ __forceinline__ int owner(int index) const {
    const u32 rest = index - longer * (share + 1), of_longer = share + 1;
    return index < longer * (share + 1) ? index / of_longer : longer + rest / share;
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
