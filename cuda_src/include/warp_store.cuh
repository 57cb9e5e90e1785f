// How a warp of matmul_large.cu stores its sums, on any GPU.
#pragma once

#include "matmul_tile.cuh"

// 16 rows of BN sums get bias, SiLU product or residual, and are stored in pieces of columns that
// are put together in shared memory, so that whole lines are written.
template <typename T, typename Out, int BN, bool SILU> struct WarpStore {
  static constexpr int kOperands = SILU ? 2 : 1;
  static constexpr int kCols = BN / kOperands;  // of y
  static constexpr int kMaxPiece = 128 / sizeof(Out);
  static constexpr int kPiece = kCols % kMaxPiece == 0 ? kMaxPiece : kCols % 32 == 0 ? 32 : 16;
  static constexpr int kPieces = kCols / kPiece;
  static constexpr int kVec = 16 / sizeof(Out);
  static constexpr u32 kPitch = kPiece * sizeof(Out) + 16;  // lanes of a fragment hit all banks
  static constexpr u32 kBytes = 16 * kPitch;  // of shared memory for each warp
  using Residual = u32[kPiece / 8][2];

  const T* bias;
  const T* residual;
  Out* y;
  int M, num_cols;
  i64 residual_stride, y_stride;
  u32 buffer;

  // The rows begin at row0 of y, the sums at `weight_row` of the weights.
  __device__ __forceinline__ void operator()(float (&sum)[BN / 2], int row0,
                                             int weight_row) const {
    const int col0 = weight_row / kOperands;
    Residual add;
    if (!SILU && residual != nullptr) load(add, row0, col0);
    if (bias != nullptr) add_bias(sum, weight_row);
    store_pieces<>(sum, add, row0, col0);
  }

 private:
  // The first of the sums is for weight row `weight_row`.
  __device__ __forceinline__ void add_bias(float (&sum)[BN / 2], int weight_row) const {
    const int num_rows = num_cols * kOperands;
    const int first = weight_row + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
      const int row = first + 8 * j;
      if (row < num_rows) {
        const bool both = row + 1 < num_rows;
        const float2 b = load2(bias + row, both, both);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          sum[4 * j + 2 * half] += b.x;
          sum[4 * j + 2 * half + 1] += b.y;
        }
      }
    }
  }

  // The residual's elements that belong to this lane's sums of a piece.
  __device__ __forceinline__ void load(Residual& add, int row0, int col0) const {
    const int row = row0 + threadIdx.x % kWarpSize / 4;
    const int col = col0 + threadIdx.x % 4 * 2;
    const T* const p = residual + row * residual_stride + col;
    if (residual_stride % 2 == 0 && row0 + 16 <= M && col0 + kPiece <= num_cols) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < kPiece / 8; j++) {
          add[j][half] = *reinterpret_cast<const u32*>(p + 8 * half * residual_stride + 8 * j);
        }
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int j = 0; j < kPiece / 8; j++) {
        add[j][half] = 0;
        if (row + 8 * half < M && col + 8 * j < num_cols) {
          const T* const from = p + 8 * half * residual_stride + 8 * j;
          const float2 v = load2(from, col + 8 * j + 1 < num_cols, false);
          add[j][half] = pack2<T>(v.x, v.y);
        }
      }
    }
  }

  template <int PIECE>
  __device__ __forceinline__ void add_residual(float (&sum)[BN / 2], const Residual& add) const {
#pragma unroll
    for (int j = 0; j < kPiece / 8; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = 4 * (PIECE * (kPiece / 8) + j) + 2 * half;
        const float2 r = unpack2<T>(add[j][half]);
        sum[i] += r.x;
        sum[i + 1] += r.y;
      }
    }
  }

  template <int PIECE>
  __device__ __forceinline__ void store(const float (&sum)[BN / 2], int row0, int col0) const {
    const int lane = threadIdx.x % kWarpSize;
    const u32 mine = buffer + lane / 4 * kPitch + lane % 4 * (2 * sizeof(Out));
#pragma unroll
    for (int j = 0; j < kPiece / 8; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = 4 * (PIECE * (kPiece / 8) + j) * kOperands + 2 * half;
        float2 v = {sum[i], sum[i + 1]};
        if constexpr (SILU) v = {silu(v.x) * sum[i + 4], silu(v.y) * sum[i + 5]};
        const u32 to = mine + 8 * half * kPitch + j * (8 * sizeof(Out));
        if constexpr (sizeof(Out) == 4) {
          store_shared(to, v);
        } else {
          store_shared(to, pack2<Out>(v.x, v.y));
        }
      }
    }
    __syncwarp();
    constexpr int kVecs = kPiece / kVec;  // in a row
    constexpr int kRows = kWarpSize / kVecs;  // at a time
    const int row = lane / kVecs;
    const int col = col0 + lane % kVecs * kVec;
    const u32 from = buffer + row * kPitch + lane % kVecs * 16;
    Out* const to = y + (row0 + row) * y_stride + col;
    const bool whole = reinterpret_cast<u64>(y) % 16 == 0 && y_stride % kVec == 0 &&
                       col + kVec <= num_cols;
    float4 v[16 / kRows];
#pragma unroll
    for (int i = 0; i < 16 / kRows; i++) v[i] = load_shared_4(from + i * kRows * kPitch);
#pragma unroll
    for (int i = 0; i < 16 / kRows; i++) {
      if (row0 + row + i * kRows >= M) break;
      Out* const p = to + i * kRows * y_stride;
      if (whole) {
        *reinterpret_cast<float4*>(p) = v[i];
      } else {
        const Vec<Out, kVec> out = *reinterpret_cast<const Vec<Out, kVec>*>(&v[i]);
#pragma unroll
        for (int e = 0; e < kVec; e++) {
          if (col + e < num_cols) p[e] = out.v[e];
        }
      }
    }
    __syncwarp();
  }

  // Stores the pieces from PIECE on; `add` is the first one's residual, if there is one.
  template <int PIECE = 0>
  __device__ __forceinline__ void store_pieces(float (&sum)[BN / 2], Residual& add, int row0,
                                            int col0) const {
    if constexpr (PIECE < kPieces) {
      Residual next;
      if (!SILU && residual != nullptr) {
        if constexpr (PIECE + 1 < kPieces) load(next, row0, col0 + (PIECE + 1) * kPiece);
        if constexpr (!SILU) add_residual<PIECE>(sum, add);
      }
      store<PIECE>(sum, row0, col0 + PIECE * kPiece);
      store_pieces<PIECE + 1>(sum, next, row0, col0);
    }
  }
};
