// The k-th largest, of numbers in shared memory and of the logits of a row.
#pragma once

#include "row_part.cuh"
#include "token_weight.cuh"

__host__ __device__ constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

// A lower bound of the k-th largest of n keys in shared memory, in every thread: the largest number
// with its last kShift bits 0 that at least k of them reach. Each warp tries another value of the
// next bits.
template <int kWarps, int kShift>
__device__ __forceinline__ u32 kth_largest(const u32* keys, int n, int k) {
  constexpr int kBits = log2_of(kWarps);
  const int lane = threadIdx.x % kWarpSize, step = threadIdx.x / kWarpSize + 1;
  u32 found = 0;
#pragma unroll 1
  for (int shift = 32 - kBits;; shift = max(shift - kBits, kShift)) {
    const u32 tried = found + (static_cast<u32>(step) << shift);
    int count = 0;
    if (step < kWarps) {
#pragma unroll 4
      for (int i = lane; i < n; i += kWarpSize) count += keys[i] >= tried;
      count = warp_sum(count);
    }
    found += static_cast<u32>(__syncthreads_count(lane == 0 && step < kWarps && count >= k))
             << shift;
    if (shift == kShift) return found;
  }
}

// The key of the k-th largest logit of the row, or one that all reach if there are fewer.
template <typename PartT> __device__ __forceinline__ u32 kth_of_row(PartT& part, int k) {
  u32 found = 0;
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 2) {
    float at_least[3];
#pragma unroll
    for (u32 i = 0; i < 3; ++i) at_least[i] = value_of(found + ((i + 1) << shift));
    i32 counts[3] = {};
    part.template for_each<2>([&](const Vec<float, 4>& values, i32) {
#pragma unroll
      for (int i = 0; i < 12; ++i) counts[i / 4] += values.v[i % 4] >= at_least[i / 4];
    });
    Sums sums = {static_cast<u64>(counts[0]) | static_cast<u64>(counts[1]) << 32,
                 static_cast<u64>(counts[2])};
    sums = over_block(sums, Sums{0, 0}, part.shared.sums, warp_sums);
    sums = part.exchange(sums, Sums{0, 0}, &Shared::Message::sums, warp_sums);
    const u32 step = (static_cast<u32>(sums.all) >= k) + (sums.all >> 32 >= k) + (sums.above >= k);
    found += step << shift;
  }
  return found;
}
