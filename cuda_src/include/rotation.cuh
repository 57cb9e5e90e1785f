// The rotation of rotary position embedding: sines and cosines of large float32 angles.
#pragma once

#include "common.cuh"

struct SinCos {
  float cos, sin;
};

// Of the angle position * inv_freq, one float32 multiplication, as in the models' reference
// implementation; for angles up to about 1e6, to 2e-7. sincosf would reduce large angles with a
// table on the stack; here the angle becomes half-turns in two floats, of which multiples of 2 are
// dropped exactly.
__device__ __forceinline__ SinCos rope_angle(int position, float inv_freq) {
  constexpr float kInvPi = 0.318309886183790672f;
  constexpr float kInvPiLow = static_cast<float>(0.318309886183790672 - kInvPi);
  const float angle = __fmul_rn(static_cast<float>(position), inv_freq);
  const float high = __fmul_rn(angle, kInvPi);
  const float low = __fmaf_rn(angle, kInvPiLow, __fmaf_rn(angle, kInvPi, -high));
  const float reduced = __fmaf_rn(-2.0f, rintf(0.5f * high), high);
  SinCos r;
  sincospif(reduced + low, &r.sin, &r.cos);
  return r;
}

// A pair (a, b) turned. The operations are spelled out, so that all kernels agree to the bit.
__device__ __forceinline__ float2 rotate_pair(float a, float b, SinCos r) {
  return {__fmaf_rn(a, r.cos, -__fmul_rn(b, r.sin)), __fmaf_rn(b, r.cos, __fmul_rn(a, r.sin))};
}
