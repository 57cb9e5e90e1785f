// Attention by Hopper's tensor-core products (wgmma.cuh): scores that overwrite their registers,
// weights (registers) times values (shared memory, keys along rows), and the softmax in between.
//
// A warpgroup has 64 queries. Lane (group, pair) of warp w has rows 16 w + group and + 8 of scores,
// weights and outputs, and of each 8 columns 2 pair and + 1: score[4 j + 2 r + e] is row r of the
// two, column 8 j + 2 pair + e. Packed to 16 bits, scores are the A operand of the second product.
#pragma once

#include "softmax_state.cuh"
#include "wgmma.cuh"

// Values as the B operand: columns of 64 elements (128 bytes, permuted as by swizzled_chunk<8>) for
// each key; groups of 8 keys are 1 KiB apart, columns 64.. `half_bytes` further. 16 keys further is
// 2 KiB further.
__device__ __forceinline__ u64 wgmma_value_tile(u32 address, u32 half_bytes) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | (static_cast<u64>(half_bytes >> 4) << 16) |
         (64ull << 32) | (1ull << 62);
}

// score = a b^T (CLEAR) or score += a b^T over 16 elements of a head, tiles by their descriptors.
template <typename T, int KEYS, bool CLEAR>
__device__ __forceinline__ void wgmma_scores(float (&d)[KEYS / 2], u64 a, u64 b);

#define DEFINE_WGMMA_SCORES(T, NAME, CLEAR, SCALE) \
  template <> \
  __device__ __forceinline__ void wgmma_scores<T, 128, CLEAR>(float (&d)[64], u64 a, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME \
                 " {" PLACES_64 "}, %64, %65, " SCALE ", 1, 1, 0, 0;" \
                 : D_64(0) \
                 : "l"(a), "l"(b)); \
  }
DEFINE_WGMMA_SCORES(__nv_bfloat16, "bf16", true, "0")
DEFINE_WGMMA_SCORES(__nv_bfloat16, "bf16", false, "1")
DEFINE_WGMMA_SCORES(__half, "f16", true, "0")
DEFINE_WGMMA_SCORES(__half, "f16", false, "1")

// out [64, HEAD_DIM] += a [64, 16 keys] b [16 keys, HEAD_DIM]: `b` is a wgmma_value_tile.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void wgmma_values(float (&d)[HEAD_DIM / 2], const u32* a, u64 b);

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

// Says to the compiler that these registers may have changed here: those of products in flight,
// behind the wait for them.
template <int N> __device__ __forceinline__ void touch(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ __forceinline__ void touch(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// The softmax of a lane's two rows, tile of keys by tile of keys. `sum` is over its own columns.
struct RowsSoftmax {
  float max[2] = {kNegInf, kNegInf}, sum[2] = {};
  float keep[2];  // what outputs so far must be multiplied by

  // Scores of further keys become weights: 2^(scale_log2 * (score - max)).
  template <int N> __device__ __forceinline__ void take(float (&score)[N], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m[2] = {score[2 * r], score[2 * r + 1]};
#pragma unroll
      for (int i = 1; i < N / 4; i++) {
        m[0] = fmaxf(m[0], score[4 * i + 2 * r]);
        m[1] = fmaxf(m[1], score[4 * i + 2 * r + 1]);
      }
      float new_max = fmaxf(fmaxf(m[0], m[1]), max[r]);
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 2));
      keep[r] = exp2_fast((max[r] - new_max) * scale_log2);
      max[r] = new_max;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float offset = max[r] * scale_log2;
      float part[2] = {};
#pragma unroll
      for (int i = 0; i < N / 4; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int at = 4 * i + 2 * r + e;
          score[at] = exp2_fast(fmaf(score[at], scale_log2, -offset));
          part[e] += score[at];
        }
      }
      sum[r] = fmaf(sum[r], keep[r], part[0] + part[1]);
    }
  }

  // What the outputs of row r must be multiplied by in the end.
  __device__ __forceinline__ float inverse_sum(int r) const {
    float all = sum[r];
    all += __shfl_xor_sync(kFullMask, all, 1);
    all += __shfl_xor_sync(kFullMask, all, 2);
    return 1.0f / all;
  }
};

// Of 4 groups of 8 columns a lane has 2 columns each, packed; it gets all 8 of group `pair`.
__device__ __forceinline__ uint4 gather_row(const u32 (&v)[4]) {
  const int pair = threadIdx.x % 4;
  const bool odd = pair & 1, high = pair & 2;
  const u32 a = __shfl_xor_sync(kFullMask, odd ? v[0] : v[1], 1);
  const u32 b = __shfl_xor_sync(kFullMask, odd ? v[2] : v[3], 1);
  const u32 w0 = odd ? a : v[0], w1 = odd ? v[1] : a;
  const u32 w2 = odd ? b : v[2], w3 = odd ? v[3] : b;
  const u32 e = __shfl_xor_sync(kFullMask, high ? w0 : w2, 2);
  const u32 f = __shfl_xor_sync(kFullMask, high ? w1 : w3, 2);
  return high ? uint4{e, f, w2, w3} : uint4{w0, w1, e, f};
}
