// Weight of a logit in its row's softmax with temperature: an integer in units of 2^-40.
//
// Sums of integers do not depend on their order. Each operation is rounded as in
// tinyvllm/ops/token_filter.py, so the integers are the same there. A larger logit never weighs
// less: the exponent is rounded to 2^-20 within its octave, and the polynomial's values at
// neighbours of that grid are further apart than its error (a test goes through all of them).
#pragma once

#include "common.cuh"

constexpr u32 kLowestKey = 0x007fffffu;  // of -infinity

// An integer of the same order as the logit; NaN gets the lowest of all, -0 that of 0.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return x != x ? 0 : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The logit of a key; some keys, among them all below kLowestKey, give NaN.
__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

struct TokenWeight {
  float best, scale;

  __device__ __forceinline__ TokenWeight(float best, float temperature)
      : best(best), scale(fminf(__fdiv_rn(1.44269504088896341f, temperature), 1e30f)) {}

  __device__ __forceinline__ u64 operator()(float x) const {
    // The least weighs 0, and so does NaN.
    const float exponent =
        x == best ? 0.0f : fmaxf(__fmul_rn(__fsub_rn(x, best), scale), -42.0f);
    // Adding and taking away a large number rounds to a multiple of its last place.
    const float shifted = __fadd_rn(exponent, 0x1.8p23f);
    float part = __fsub_rn(exponent, __fsub_rn(shifted, 0x1.8p23f));
    part = __fsub_rn(__fadd_rn(part, 12.0f), 12.0f);
    float slope = 1.327593694e-03f;  // 2^part = 1 + part * slope
    slope = __fmaf_rn(slope, part, 9.675556794e-03f);
    slope = __fmaf_rn(slope, part, 5.550743267e-02f);
    slope = __fmaf_rn(slope, part, 2.402218282e-01f);
    slope = __fmaf_rn(slope, part, 6.931470037e-01f);
    // 2 + 2^part lies in [2, 4): its last 23 bits are 2^part in units of 2^-22.
    const u32 power = __float_as_uint(__fmaf_rn(part, slope, 3.0f)) - 0x40000000u;
    return (static_cast<u64>(power) << 18) >> (0x4b400000u - __float_as_uint(shifted));
  }
};
