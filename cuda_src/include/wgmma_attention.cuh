// What attention needs of Hopper's tensor-core products beyond wgmma.cuh: scores that overwrite
// their registers, weights (registers) times values (shared memory, keys along rows), and waits
// that tie the registers of products in flight, so that the compiler touches them only after it.
#pragma once

#include "wgmma.cuh"

// Values as the B operand: D_PART columns of 64 elements (128 bytes, permuted as by
// swizzled_chunk<8>) for each key; groups of 8 keys are 1 KiB apart, columns 64.. `half_bytes`
// further. 16 keys further is 2 KiB further.
__device__ __forceinline__ u64 wgmma_value_tile(u32 address, u32 half_bytes) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | (static_cast<u64>(half_bytes >> 4) << 16) |
         (64ull << 32) | (1ull << 62);
}

#define PLACES_96 \
  PLACES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
            ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D_96(i) D_64(i), D_32(i + 64)

// score = a b^T (CLEAR), or score += a b^T, for tiles by their descriptors.
template <typename T, int N, bool CLEAR>
__device__ __forceinline__ void wgmma_scores(float (&d)[N / 2], u64 a, u64 b);

#define DEFINE_WGMMA_SCORES(T, NAME, N, COUNT, A, B, CLEAR, SCALE) \
  template <> \
  __device__ __forceinline__ void wgmma_scores<T, N, CLEAR>(float (&d)[N / 2], u64 a, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                 " {" PLACES_##COUNT "}, " A ", " B ", " SCALE ", 1, 1, 0, 0;" \
                 : D_##COUNT(0) \
                 : "l"(a), "l"(b)); \
  }
#define DEFINE_WGMMA_SCORES_OF(T, NAME, N, COUNT, A, B) \
  DEFINE_WGMMA_SCORES(T, NAME, N, COUNT, A, B, true, "0") \
  DEFINE_WGMMA_SCORES(T, NAME, N, COUNT, A, B, false, "1")
#define DEFINE_ALL_WGMMA_SCORES(T, NAME) \
  DEFINE_WGMMA_SCORES_OF(T, NAME, 64, 32, "%32", "%33") \
  DEFINE_WGMMA_SCORES_OF(T, NAME, 128, 64, "%64", "%65") \
  DEFINE_WGMMA_SCORES_OF(T, NAME, 192, 96, "%96", "%97")
DEFINE_ALL_WGMMA_SCORES(__nv_bfloat16, "bf16")
DEFINE_ALL_WGMMA_SCORES(__half, "f16")

// out [64, N] += a [64, 16 keys] b [16 keys, N]: `a` is an mma fragment, b a wgmma_value_tile.
template <typename T, int N>
__device__ __forceinline__ void wgmma_values(float (&d)[N / 2], const u32* a, u64 b);

#define DEFINE_WGMMA_VALUES(T, NAME, N, COUNT, A, B) \
  template <> \
  __device__ __forceinline__ void wgmma_values<T, N>(float (&d)[N / 2], const u32* a, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                 " {" PLACES_##COUNT "}, " A ", " B ", 1, 1, 1, 1;" \
                 : D_##COUNT(0) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }
DEFINE_WGMMA_VALUES(__nv_bfloat16, "bf16", 64, 32, "{%32, %33, %34, %35}", "%36")
DEFINE_WGMMA_VALUES(__half, "f16", 64, 32, "{%32, %33, %34, %35}", "%36")
DEFINE_WGMMA_VALUES(__nv_bfloat16, "bf16", 128, 64, "{%64, %65, %66, %67}", "%68")
DEFINE_WGMMA_VALUES(__half, "f16", 128, 64, "{%64, %65, %66, %67}", "%68")

// Says to the compiler that these registers may have changed here.
template <int N> __device__ __forceinline__ void touch(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ __forceinline__ void touch(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}
