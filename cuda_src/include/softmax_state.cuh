// The state of a softmax-weighted sum over part of the context, and how two of them merge.
#pragma once

#include "common.cuh"

constexpr float kNegInf = __builtin_bit_cast(float, 0xff800000u);

// 2^x in one instruction (relative error 2^-22); 2^-inf = 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What scores are taken relative to: -inf - -inf would be NaN, so without any token it is 0.
__device__ __forceinline__ float finite_max(float max) { return max == kNegInf ? 0.0f : max; }

// What the outputs of two states are multiplied by before they are added.
struct MergeWeights {
  float self, other;
};

// Over some tokens; beside it the caller keeps output[d] = sum of 2^(score - max) * v[d]. Scores
// are in units of log2, that is, multiplied by log2(e), so that one ex2 is the exponential.
struct SoftmaxState {
  float max;  // largest score
  float sum;  // sum of 2^(score - max)

  // No token yet: merging it changes nothing.
  __device__ __forceinline__ static SoftmaxState empty() { return {kNegInf, 0.0f}; }

  // Takes in the state of other tokens. The operations are spelled out (no contraction left to
  // the compiler) so that kernels which merge the same states in the same order agree to the bit.
  __device__ __forceinline__ MergeWeights merge(const SoftmaxState& other) {
    const float new_max = fmaxf(max, other.max);
    const float reference = finite_max(new_max);
    const MergeWeights w = {exp2_fast(max - reference), exp2_fast(other.max - reference)};
    sum = __fmaf_rn(sum, w.self, __fmul_rn(other.sum, w.other));
    max = new_max;
    return w;
  }
};

__device__ __forceinline__ float merge_output(float self, float other, const MergeWeights& w) {
  return __fmaf_rn(self, w.self, __fmul_rn(other, w.other));
}

// One thread's part of the attention of one head over some of the tokens.
template <int VECS> struct Partial {
  SoftmaxState state = SoftmaxState::empty();
  float4 out[VECS] = {};

  __device__ __forceinline__ void merge(const Partial& other) {
    const MergeWeights w = state.merge(other.state);
#pragma unroll
    for (int v = 0; v < VECS; v++) {
      out[v].x = merge_output(out[v].x, other.out[v].x, w);
      out[v].y = merge_output(out[v].y, other.out[v].y, w);
      out[v].z = merge_output(out[v].z, other.out[v].z, w);
      out[v].w = merge_output(out[v].w, other.out[v].w, w);
    }
  }
};
