// What a warp does with a tile of keys and values of one KV head, and up to 8 queries of it.
//
// Both products are transposed, so that tokens or dimensions are the 16 rows of mma.m16n8k16 and
// the queries its 8 columns (fewer only leave tensor cores idle):
//   S^T [token, query] = K Q^T,  O^T [dim, query] += V^T P^T,
// with K by ldmatrix, V^T by ldmatrix.trans and P^T from S^T, rounded to T, by movmatrix. A tile is
// [tokens][head_dim] of T in shared memory, its 16-byte chunks swizzled (mma.cuh).
//
// In all fragments, column 2 (lane % 4) + h is entry h of each two. SUBTILES are 16 tokens each,
// STEPS 16 dimensions.
#pragma once

#include "mma.cuh"
#include "softmax_state.cuh"

// Scores of tokens lane / 4 (0, 1) and lane / 4 + 8 (2, 3) of each 16; `query`: B of the mma.
template <typename T, int SUBTILES, int STEPS>
__device__ __forceinline__ void add_scores(float (&score)[SUBTILES][4],
                                           const u32 (&query)[STEPS][2], u32 k_tile) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int u = 0; u < SUBTILES; u++) {
      // Matrices: tokens 0-7 and 8-15 with dimensions 0-7, then with dimensions 8-15 of 16.
      const int r = 16 * u + lane % 16, chunk = 2 * s + lane / 16;
      u32 a[4];
      ldmatrix_x4(a, k_tile + 16 * swizzled_chunk<2 * STEPS>(r, chunk));
      mma_m16n8k16<T>(score[u], a, query[s][0], query[s][1]);
    }
  }
}

// Scores become weights relative to the new maxima, 0 from token `valid` (at least 1) on. `keep`:
// what earlier sums are to be multiplied by; those of `state`, of this lane's tokens only, are.
template <int SUBTILES>
__device__ __forceinline__ void to_weights(float (&score)[SUBTILES][4], float (&keep)[2],
                                           SoftmaxState (&state)[2], float scale_log2, int valid) {
  const int group = threadIdx.x % kWarpSize / 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float max = kNegInf;
#pragma unroll
    for (int i = 0; i < 2 * SUBTILES; i++) {
      float& x = score[i / 2][i % 2 * 2 + h];
      x = 8 * i + group < valid ? x * scale_log2 : kNegInf;
      max = fmaxf(max, x);
    }
#pragma unroll
    for (int offset = 4; offset < kWarpSize; offset *= 2) {
      max = fmaxf(max, __shfl_xor_sync(kFullMask, max, offset));
    }
    max = fmaxf(max, state[h].max);  // finite, as a token is valid
    keep[h] = exp2_fast(state[h].max - max);
    state[h].max = max;
    state[h].sum *= keep[h];
#pragma unroll
    for (int i = 0; i < 2 * SUBTILES; i++) {
      float& x = score[i / 2][i % 2 * 2 + h];
      x = exp2_fast(x - max);
      state[h].sum += x;
    }
  }
}

// out = keep * out + the weighted values, for dimensions lane / 4 (0, 1) and lane / 4 + 8 (2, 3) of
// each 16.
template <typename T, int SUBTILES, int STEPS>
__device__ __forceinline__ void add_values(float (&out)[STEPS][4], const float (&keep)[2],
                                           const float (&weight)[SUBTILES][4], u32 v_tile) {
  const int lane = threadIdx.x % kWarpSize;
  u32 b[SUBTILES][2];
#pragma unroll
  for (int u = 0; u < SUBTILES; u++) {
    b[u][0] = transpose_8x8(pack2<T>(weight[u][0], weight[u][1]));
    b[u][1] = transpose_8x8(pack2<T>(weight[u][2], weight[u][3]));
  }
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int e = 0; e < 4; e++) out[s][e] *= keep[e % 2];
#pragma unroll
    for (int u = 0; u < SUBTILES; u++) {
      // Matrices: dimensions 0-7 and 8-15 of 16 with tokens 0-7, then with tokens 8-15.
      const int r = 16 * u + lane / 16 * 8 + lane % 8, chunk = 2 * s + lane / 8 % 2;
      u32 a[4];
      ldmatrix_x4_trans(a, v_tile + 16 * swizzled_chunk<2 * STEPS>(r, chunk));
      mma_m16n8k16<T>(out[s], a, b[u][0], b[u][1]);
    }
  }
}
