// Philox4x32-7, the counter-based random number generator (Salmon et al., SC 2011): the fewest rounds
// that pass all of its authors' tests. Ten are usual, and a good part of a draw's instructions.
#pragma once

#include "common.cuh"

constexpr int kPhiloxRounds = 7;

struct PhiloxKeys {
  uint2 round[kPhiloxRounds];
};

// The keys of the rounds.
__device__ __forceinline__ PhiloxKeys philox_keys(uint2 key) {
  PhiloxKeys keys;
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    keys.round[round] = key;
    // Stays in registers: the compiler would rather add anew each time.
    asm volatile("" : "+r"(keys.round[round].x), "+r"(keys.round[round].y));
    key.x += 0x9e3779b9u;
    key.y += 0xbb67ae85u;
  }
  return keys;
}

// Four random words for a 128-bit counter: rounds of two multiplications.
__device__ __forceinline__ uint4 philox4x32(uint4 counter, const PhiloxKeys& keys) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint2 key = keys.round[round];
    const u32 high0 = __umulhi(0xd2511f53u, counter.x), low0 = 0xd2511f53u * counter.x;
    const u32 high1 = __umulhi(0xcd9e8d57u, counter.z), low1 = 0xcd9e8d57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
  }
  return counter;
}

// Gumbel noise -log(-log(u)) of a uniform u = 1 - w, where w is the random word scaled to (0, 1):
// -log(u) = -log1p(-w) keeps its relative precision where the noise is large.
__device__ __forceinline__ float gumbel(u32 word) {
  const float w = fminf((__uint2float_rn(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return -logf(-log1pf(-w));
}

// At most log2(-log1p(-w)): noise is at most that times -ln 2. To some 2^-16 of what is meant, which
// up to w = 0.85 is less than 0.008 too small, and for small w, where noise is large, much less.
__device__ __forceinline__ float noise_log2(u32 word) {
  const float w = fmaf(__uint2float_rn(word), 0x1p-32f, 0x1p-33f);
  float log2_of_w;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2_of_w) : "f"(w));
  return fmaf(w, fmaf(w, fmaf(w, fmaf(w, 1.24285f, -0.785752f), 0.524436f), 0.705752f), log2_of_w);
}
constexpr float kMaxGumbel = 24.0f;  // more than any noise: 33 ln 2
