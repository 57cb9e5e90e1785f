// RMS norm inside of a product: the weight on x, the sum of squares on the side.
#pragma once

#include "mma.cuh"

// Volatile, so that it stays ahead of the waits for weights that follow it.
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Eight elements of x times as many of the norm's weight; adds the squares of x to `squares`.
template <typename T>
__device__ __forceinline__ uint4 weighted(uint4 x, uint4 weight, float& squares) {
  u32(&parts)[4] = reinterpret_cast<u32(&)[4]>(x);
  const u32(&weights)[4] = reinterpret_cast<const u32(&)[4]>(weight);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 a = unpack2<T>(parts[i]);
    const float2 b = unpack2<T>(weights[i]);
    squares = fmaf(a.x, a.x, fmaf(a.y, a.y, squares));
    parts[i] = pack2<T>(a.x * b.x, a.y * b.y);
  }
  return x;
}

// The 16 bytes that another lane of the warp holds.
__device__ __forceinline__ uint4 from_lane(uint4 v, int lane) {
  return {__shfl_sync(kFullMask, v.x, lane), __shfl_sync(kFullMask, v.y, lane),
          __shfl_sync(kFullMask, v.z, lane), __shfl_sync(kFullMask, v.w, lane)};
}
