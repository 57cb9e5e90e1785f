// A row of logits shared out to the blocks of a cluster, and what these tell each other.
#pragma once

#include <math_constants.h>

#include "cluster.cuh"
#include "mma.cuh"
#include "reduce.cuh"

constexpr int kMaxKept = 512;

// A logit that may be left.
struct alignas(16) Kept {
  u64 weight;
  u32 key;
  i32 index;
};

// Sums of weights: of all logits left by min_p and top_k, and of those of them above the winner.
struct Sums {
  u64 all, above;
};

// A block's weights: of all that min_p leaves (with top_p alone), of those kept, and their number.
struct alignas(8) Share {
  u64 all, kept;
  i32 count;
};

struct alignas(16) Shared {
  union {
    u32 maxima[1024];     // of the threads
    Kept kept[kMaxKept];  // in the first block: a part for each block
  };
  Share shares[kMaxCluster];
  union {
    Candidate candidates[kMaxWarps];
    Sums sums[kMaxWarps];
    u32 keys[kMaxWarps];
  };
  union Message {  // from each block; they take turns
    Candidate candidates[kMaxCluster];
    Sums sums[kMaxCluster];
    uint2 keys[kMaxCluster];
  } messages[2];
  i32 num_kept;
};
static_assert(sizeof(Shared) == 9168, "SHARED_BYTES in tinyvllm/ops/sample.py");

// One block's part of a row: every CLUSTER-th tile of 4 * THREADS logits, of which each thread
// brings its own four to shared memory, and reads no others. TILES of them are there at a time, or,
// if it is 0, all of them are brought at once and stay.
template <bool ALIGNED, int THREADS, int CLUSTER, int TILES> struct RowPart {
  static constexpr int kThreads = THREADS, kBlocks = CLUSTER;
  static constexpr int kTile = 4 * THREADS, kStride = CLUSTER * kTile;
  static_assert((TILES & (TILES - 1)) == 0 && TILES != 1, "places are taken in turn by a mask");
  Shared& shared;
  const float* row;  // in global memory
  float* staged;     // this thread's part of the first tile in shared memory
  i32 begin, vocab;  // of this thread's first four logits
  int turn;

  // Calls f(four logits, the first one's index) for all of the part, all threads of a warp at once;
  // behind the row come NaN.
  template <int UNROLL = 1, typename F> __device__ __forceinline__ void for_each(F f) const {
    const i32 last = vocab - 1 + begin;  // as many for all
    if constexpr (TILES == 0) {
      const float* x = staged;
#pragma unroll UNROLL
      for (i32 i = begin; i <= last; i += kStride, x += kTile) {
        f(*reinterpret_cast<const Vec<float, 4>*>(x), i);
      }
    } else {
      constexpr int kAhead = TILES - 1;
#pragma unroll 1
      for (int tile = 0; tile < kAhead; ++tile) {
        copy(staged + tile * kTile, begin + tile * kStride);
        cp_async_commit();
      }
      u32 tile = 0;
#pragma unroll 1
      for (i32 i = begin; i <= last; i += kStride, ++tile) {
        cp_async_wait<kAhead - 1>();
        const auto values = *reinterpret_cast<const Vec<float, 4>*>(staged + tile % TILES * kTile);
        // To the place of the tile before, which has been dealt with.
        copy(staged + (tile + kAhead) % TILES * kTile, i + kAhead * kStride);
        cp_async_commit();
        f(values, i);
      }
    }
  }

  // Begins to bring all of the part to shared memory.
  __device__ __forceinline__ void stage() const {
    const i32 last = vocab - 1 + begin;
    float* x = staged;
#pragma unroll 4
    for (i32 i = begin; i <= last; i += kStride, x += kTile) copy(x, i);
    cp_async_commit();
  }

  // Begins to copy logits i to i + 3 to x.
  __device__ __forceinline__ void copy(float* x, i32 i) const {
    if (ALIGNED && i < vocab) {
      cp_async_16(smem_address(x), row + i);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!ALIGNED && i + j < vocab) {
        cp_async_4(smem_address(x + j), row + i + j);
      } else {
        x[j] = CUDART_NAN_F;
      }
    }
  }
  __device__ __forceinline__ void sync() const {
    if constexpr (CLUSTER > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // What the blocks say, one value each, combined in every thread. combine(x of this lane) is a
  // reduction over a warp in which lane i has the value of block i, and the others `none`.
  template <typename T, typename Combine>
  __device__ __forceinline__ T exchange(T mine, T none, T (Shared::Message::*field)[kMaxCluster],
                                        Combine combine) {
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < CLUSTER) {
      (at_rank(&shared, lane)->messages[turn].*field)[blockIdx.x] = mine;
    }
    sync();
    const T value = lane < CLUSTER ? (shared.messages[turn].*field)[lane] : none;
    turn ^= 1;
    return combine(value);
  }
};

__device__ __forceinline__ u32 warp_max_key(u32 x) { return __reduce_max_sync(kFullMask, x); }
__device__ __forceinline__ u32 warp_min_key(u32 x) { return __reduce_min_sync(kFullMask, x); }

__device__ __forceinline__ u64 warp_sum_u64(u64 x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kFullMask, x, offset);
  }
  return x;
}

__device__ __forceinline__ Sums warp_sums(Sums x) {
  return {warp_sum_u64(x.all), warp_sum_u64(x.above)};
}

// A warp's reduction, over the block; the rules of block_sum in reduce.cuh.
template <typename T, typename Combine>
__device__ __forceinline__ T over_block(T x, T none, T* scratch, Combine combine) {
  const int lane = threadIdx.x % kWarpSize;
  x = combine(x);
  __syncthreads();
  if (lane == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return combine(lane < blockDim.x / kWarpSize ? scratch[lane] : none);
}
