// Element types, integer aliases and conversions that every kernel uses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr int kWarpSize = 32;
constexpr u32 kFullMask = 0xffffffffu;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Programmatic dependent launch (sm_90 and newer): a kernel may start while the one before it in
// the stream still runs, and so hide its own start. The rules that make this safe, for every
// kernel that a program launches:
//   * it calls wait_for_previous() in every thread, and before that reads nothing but weights and
//     constants of the model and writes nothing to global memory (buffers are reused, so early
//     reads see old values and early writes destroy what is still read);
//   * pointers to anything else are not __restrict__: loads through those may be moved up past the
//     wait, as loads of memory that never changes.
// start_next() says that the next kernel may be started once all blocks of this one have said so.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// float <-> storage type T (bfloat16, half or float), rounded to nearest even.
template <typename T> __device__ __forceinline__ float to_float(T x);
template <> __device__ __forceinline__ float to_float(float x) { return x; }
template <> __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <> __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float(float x) { return x; }
template <> __device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

// N elements of T that are loaded and stored as one access (N * sizeof(T) <= 16 bytes).
template <typename T, int N> struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Sum over the warp, in every lane; the order is fixed, so the result is reproducible.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset));
  }
  return x;
}
