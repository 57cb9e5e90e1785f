// Reductions over a block whose order is fixed by the number of threads, so that they reproduce.
#pragma once

#include <math_constants.h>

#include "common.cuh"

constexpr int kMaxWarps = 1024 / kWarpSize;
constexpr i32 kNoIndex = 0x7fffffff;

__device__ __forceinline__ i32 warp_sum(i32 x) { return __reduce_add_sync(kFullMask, x); }

// Sum over the block, in every thread. Every thread of every warp must take part. `scratch` is
// shared memory for kMaxWarps values and may be the same one in successive calls.
template <typename T> __device__ __forceinline__ T block_sum(T x, T* scratch) {
  const int lane = threadIdx.x % kWarpSize;
  x = warp_sum(x);
  __syncthreads();  // the previous call's values have been read
  if (lane == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / kWarpSize ? scratch[lane] : T(0));
}

// A value and where it was found.
struct alignas(8) Candidate {
  float value;
  i32 index;
};

// What a search starts from: every candidate is before it, also one that is -infinity.
__device__ __forceinline__ Candidate no_candidate() { return {-CUDART_INF_F, kNoIndex}; }

// The order of candidates: larger values first, equal ones by index. A total order without NaN,
// so the best of a set does not depend on how it is searched. A NaN is never before anything.
__device__ __forceinline__ bool before(Candidate a, Candidate b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The first of those of LANES neighbours, in each of them.
template <int LANES> __device__ __forceinline__ Candidate best_of_lanes(Candidate x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    Candidate other;
    other.value = __shfl_xor_sync(kFullMask, x.value, offset);
    other.index = __shfl_xor_sync(kFullMask, x.index, offset);
    if (before(other, x)) x = other;
  }
  return x;
}

__device__ __forceinline__ Candidate warp_best(Candidate x) {
  return best_of_lanes<kWarpSize>(x);
}

// The first of the block's candidates, in every thread; the same rules as block_sum.
__device__ __forceinline__ Candidate block_best(Candidate x, Candidate* scratch) {
  const int lane = threadIdx.x % kWarpSize;
  x = warp_best(x);
  __syncthreads();
  if (lane == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_best(lane < blockDim.x / kWarpSize ? scratch[lane] : no_candidate());
}
