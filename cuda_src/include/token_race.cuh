// The race of a row's tokens: each runs with its logit plus scaled Gumbel noise, the largest wins.
//
// Noise is bounded first: logarithms are computed only for what may win, random words only where a
// group of logits may. What may win depends on the best so far, what wins does not.
#pragma once

#include "philox.cuh"
#include "reduce.cuh"

__device__ __forceinline__ float largest(const Vec<float, 4>& x) {
  return fmaxf(fmaxf(x.v[0], x.v[1]), fmaxf(x.v[2], x.v[3]));
}

struct Race {
  float temperature;
  float spread;  // of noise: what noise_log2() is to be multiplied with
  float reach;   // a smaller logit can't win
  float bar;     // nor one whose bound is smaller

  // `best`: the best value so far, -infinity at first. Logits below `lowest` don't run.
  __device__ __forceinline__ explicit Race(float temperature, float best = -CUDART_INF_F,
                                           float lowest = -CUDART_INF_F)
      : temperature(temperature), spread(temperature * 0.693147f) {
    pass(best, lowest);
  }

  __device__ __forceinline__ void pass(float best, float lowest = -CUDART_INF_F) {
    reach = fmaxf(lowest, __fmaf_rd(-kMaxGumbel, temperature, best));
    bar = best;
    // Less by more than the roundings of the bound, of the noise and of the sum.
    if (temperature > 0.0f) {
      const float size = fminf(fabsf(best), CUDART_MAX_NORMAL_F);
      bar = __fmaf_rd(size, -0x1p-22f, __fmaf_rd(-0x1p-13f, temperature, best));
    }
  }

  // The random words of a group of four tokens, by the index of the first.
  __device__ __forceinline__ Vec<u32, 4> words(const PhiloxKeys& keys, u32 index,
                                               u32 position) const {
    const uint4 words = philox4x32(make_uint4(index / 4, position, 0, 0), keys);
    return {words.x, words.y, words.z, words.w};
  }

  // What a logit and its noise are at most together.
  __device__ __forceinline__ float bound(float logit, u32 word) const {
    return fmaf(-spread, noise_log2(word), logit);
  }

  __device__ __forceinline__ Vec<float, 4> bounds(const Vec<float, 4>& logits,
                                                  const Vec<u32, 4>& words) const {
    Vec<float, 4> bounds;
#pragma unroll
    for (int i = 0; i < 4; ++i) bounds.v[i] = bound(logits.v[i], words.v[i]);
    return bounds;
  }

  __device__ __forceinline__ float value(float logit, u32 word) const {
    if (temperature == 0.0f) return logit;
    return __fadd_rn(logit, __fmul_rn(temperature, gumbel(word)));
  }
};
