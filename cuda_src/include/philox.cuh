// Philox4x32-10, the counter-based random number generator (Salmon et al., SC 2011).
#pragma once

#include "common.cuh"

// Four random words for a 128-bit counter and a 64-bit key: ten rounds of two multiplications.
__device__ __forceinline__ uint4 philox4x32(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xd2511f53u, counter.x), low0 = 0xd2511f53u * counter.x;
    const u32 high1 = __umulhi(0xcd9e8d57u, counter.z), low1 = 0xcd9e8d57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += 0x9e3779b9u;
    key.y += 0xbb67ae85u;
  }
  return counter;
}

// Gumbel noise -log(-log(u)) of a uniform u = 1 - w, where w is the random word scaled to (0, 1):
// -log(u) = -log1p(-w) keeps its relative precision where the noise is large.
__device__ __forceinline__ float gumbel(u32 word) {
  const float w = fminf((__uint2float_rn(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return -logf(-log1pf(-w));
}

// Not below the noise of the word over ln 2, and where that is large hardly above: -log1p(-w) >= w.
__device__ __forceinline__ float gumbel_bound(u32 word) {
  return 32.0001f - __log2f(__uint2float_rn(word) + 0.5f);
}
constexpr float kMaxGumbel = 24.0f;  // more than any noise: 33 ln 2
