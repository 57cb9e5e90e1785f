// Reads rows of float32 logits four neighbours at a time, whatever the vocabulary's size.
#pragma once

#include <math_constants.h>

#include "common.cuh"

// Logits first ... first + 3 of a row, `first` a multiple of 4; NaN beyond the vocabulary. ALIGNED:
// the vocabulary is a multiple of 4 and rows start on 16 bytes, so that one load brings all four.
template <bool ALIGNED>
__device__ __forceinline__ Vec<float, 4> load_logits(const float* row, i32 first, i32 vocab) {
  if constexpr (ALIGNED) {
    if (first < vocab) return *reinterpret_cast<const Vec<float, 4>*>(row + first);
  }
  Vec<float, 4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.v[i] = !ALIGNED && first + i < vocab ? row[first + i] : CUDART_NAN_F;
  }
  return out;
}
