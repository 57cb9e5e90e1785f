// What becomes of a warp's 16 rows of sums on their way to global memory, in matmul_hopper.cu and
// matmul_large.cu.
#pragma once

#include "matmul_tile.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// A warp's 16 rows of sums, which are put together in shared memory in pieces of columns and leave
// from there: by TMA, or in whole lines where there is no map for it or the rows are not all in y.
// With SILU y has the products of pairs of 8 columns. BY_MAP is false where there never is a map:
// for logits, as they have odd numbers of columns, and on other GPUs.
template <typename Out, int BN, bool SILU, bool BY_MAP = sizeof(Out) == 2> struct RowPieces {
  static constexpr int kOperands = SILU ? 2 : 1;
  static constexpr int kCols = BN / kOperands;  // of y
  static constexpr int kMaxPiece = 128 / sizeof(Out);
  static constexpr int kPiece = kCols % kMaxPiece == 0 ? kMaxPiece : kCols % 32 == 0 ? 32 : 16;
  static constexpr int kPieces = kCols / kPiece;
  static constexpr int kVec = 16 / sizeof(Out);
  static constexpr int kVecs = kPiece / kVec;  // in a row
  static constexpr int kRows = kWarpSize / kVecs;  // that are written at a time
  static constexpr int kTurns = 16 / kRows;
  static constexpr u32 kPitch = kPiece * sizeof(Out);
  static constexpr u32 kPieceBytes = 16 * kPitch;
  // Of shared memory for each warp: up to two pieces, or one with padded rows.
  static constexpr u32 kBytes = BY_MAP ? 4096 : kPieceBytes + 16 * 16;

  int M, num_cols;
  u32 buffer, other;  // for the next piece, and with one that TMA may still read

  // For the kernel to call with the address of this warp's buffer.
  __device__ __forceinline__ void use(u32 address) {
    buffer = address;
    other = address + kPieceBytes;
  }

  // Where a row has a byte of its chunk-th 16, so that lanes of a fragment hit all banks: as TMA wants
  // it (driver/spec.py's TensorMap with `swizzle` of kPitch), or padded, which takes less registers.
  __device__ __forceinline__ u32 place(u32 row, u32 chunk, u32 byte = 0) const {
    if constexpr (!BY_MAP) return buffer + row * (kPitch + 16) + chunk * 16 + byte;
    const u32 key = row * kPitch / 128 % (kPitch / 16);
    return (buffer + row * kPitch + key * 16 + byte) ^ (chunk * 16);
  }

  // The row that this lane writes in a turn, after the warp's first.
  __device__ __forceinline__ static int row_of(int turn) {
    return threadIdx.x % kWarpSize / kVecs + turn * kRows;
  }

  // The first column of those that it writes of a piece.
  __device__ __forceinline__ static int col_of() { return threadIdx.x % kVecs * kVec; }

  // Writes a piece, whose columns begin at col0 of y: by `map` unless that is null, or to where
  // at(turn, col) says: a multiple of 16 bytes if `aligned`, or nowhere if it is null.
  template <int PIECE, typename At>
  __device__ __forceinline__ void write(const float (&sum)[BN / 2], int row0, int col0,
                                        const TensorMap* map, bool aligned, At at) {
    const int lane = threadIdx.x % kWarpSize;
    if constexpr (BY_MAP) {
      if (lane == 0) tma_store_wait_read<1>();
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < kPiece / 8; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = 4 * (PIECE * (kPiece / 8) + j) * kOperands + 2 * half;
        float2 v = {sum[i], sum[i + 1]};
        if constexpr (SILU) v = {silu(v.x) * sum[i + 4], silu(v.y) * sum[i + 5]};
        const int row = lane / 4 + 8 * half;
        const u32 pair = lane % 4 * (2 * sizeof(Out));
        if constexpr (sizeof(Out) == 4) {
          store_shared(place(row, 2 * j, pair), v);
        } else {
          store_shared(place(row, j, pair), pack2<Out>(v.x, v.y));
        }
      }
    }
    if constexpr (BY_MAP) {
      if (map != nullptr && row0 + 16 <= M) {
        fence_async();
        __syncwarp();
        if (lane == 0) {
          tma_store(*map, row0, col0, buffer);
          tma_store_commit();
        }
        const u32 written = buffer;
        buffer = other;
        other = written;
        return;
      }
    }
    __syncwarp();
    const int col = col0 + col_of();
    const bool whole = aligned && col + kVec <= num_cols;
    float4 v[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; i++) v[i] = load_shared_4(place(row_of(i), lane % kVecs));
#pragma unroll
    for (int i = 0; i < kTurns; i++) {
      if (row0 + row_of(i) >= M) break;
      Out* const p = at(i, col);
      if (p == nullptr) continue;
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

  // Before the end of the kernel: what TMA reads must stay until then.
  __device__ __forceinline__ static void finish() {
    if (threadIdx.x % kWarpSize == 0) tma_store_wait<0>();
  }
};

// Adds the bias to a warp's sums, of which the first is for weight row `weight_row` of num_rows.
template <typename T, int BN>
__device__ __forceinline__ void add_bias(float (&sum)[BN / 2], const T* bias, int weight_row,
                                         int num_rows) {
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

// Sums get bias and residual and become y. It and others that stand in its place tell the kernel
// what follows from the tile by their types; load() is called before the products, store() after them
// with what it has loaded, for 16 rows of a tile that begins at `weight_row`.
template <typename T, typename Out, int BN, bool SILU, typename PiecesOf = RowPieces<Out, BN, SILU>>
struct RowStore {
  using Output = Out;
  using Pieces = PiecesOf;
  static constexpr int kPiece = Pieces::kPiece;
  using Ahead = u32[kPiece / 8][2];  // the residual's elements that belong to a piece
  static constexpr bool kSilu = SILU;

  const T* bias;
  const T* residual;
  Out* y;
  i64 residual_stride, y_stride;
  const TensorMap* y_map;  // null: y cannot be written by TMA
  Pieces pieces;

  __device__ __forceinline__ void load(Ahead& ahead, int row0, int weight_row) const {
    if (!SILU && residual != nullptr) load_residual(ahead, row0, weight_row);
  }

  __device__ __forceinline__ void store(float (&sum)[BN / 2], Ahead& ahead, int row0,
                                        int weight_row) {
    if (bias != nullptr) {
      add_bias<T, BN>(sum, bias, weight_row, pieces.num_cols * Pieces::kOperands);
    }
    store_pieces<>(sum, ahead, row0, weight_row / Pieces::kOperands);
  }

 private:
  // The residual's elements that belong to this lane's sums of a piece.
  __device__ __forceinline__ void load_residual(Ahead& add, int row0,
                                                 int col0) const {
    const int row = row0 + threadIdx.x % kWarpSize / 4;
    const int col = col0 + threadIdx.x % 4 * 2;
    const T* const p = residual + row * residual_stride + col;
    if (residual_stride % 2 == 0 && row0 + 16 <= pieces.M &&
        col0 + kPiece <= pieces.num_cols) {
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
        if (row + 8 * half < pieces.M && col + 8 * j < pieces.num_cols) {
          const T* const from = p + 8 * half * residual_stride + 8 * j;
          const float2 v = load2(from, col + 8 * j + 1 < pieces.num_cols, false);
          add[j][half] = pack2<T>(v.x, v.y);
        }
      }
    }
  }

  template <int PIECE>
  __device__ __forceinline__ void add_residual(float (&sum)[BN / 2], const Ahead& add) const {
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

  // Stores the pieces from PIECE on; `add` is the first one's residual, if there is one.
  template <int PIECE = 0>
  __device__ __forceinline__ void store_pieces(float (&sum)[BN / 2], Ahead& add, int row0,
                                               int col0) {
    if constexpr (PIECE < Pieces::kPieces) {
      Ahead next;
      if (!SILU && residual != nullptr) {
        if constexpr (PIECE + 1 < Pieces::kPieces) {
          load_residual(next, row0, col0 + (PIECE + 1) * kPiece);
        }
        if constexpr (!SILU) add_residual<PIECE>(sum, add);
      }
      const int col = col0 + PIECE * kPiece;
      const bool aligned = reinterpret_cast<u64>(y) % 16 == 0 && y_stride % Pieces::kVec == 0;
      Out* const first = y + (row0 + Pieces::row_of(0)) * y_stride + col + Pieces::col_of();
      pieces.template write<PIECE>(sum, row0, col, y_map, aligned, [&](int turn, int) {
        return first + turn * Pieces::kRows * y_stride;
      });
      store_pieces<PIECE + 1>(sum, next, row0, col0);
    }
  }
};
