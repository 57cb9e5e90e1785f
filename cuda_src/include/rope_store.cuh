// RoPE and the KV write on the way out of a product: sums are heads of q, k and v in this order; q is
// rotated into `q`, k rotated and v as it is go to the paged cache (paged_kv.cuh has its layout; in a
// block the V heads follow the K heads). In place of RowStore.
//
// Results are those of rope.cu to the bit: sums are rounded before they are rotated, and after.
#pragma once

#include "rotation.cuh"
#include "row_store.cuh"

template <typename T, int BN, int HEAD_DIM> struct RopeStore {
  static_assert(HEAD_DIM % 16 == 0 && BN % HEAD_DIM == 0, "tiles have whole heads");
  using Output = T;
  using Pieces = RowPieces<T, BN, false>;
  static constexpr bool kSilu = false;
  static constexpr int kHalf = HEAD_DIM / 16;  // tiles of 8 columns in half a head

  struct Ahead {
    int position[2];            // of the rows that this lane has sums of
    int block[Pieces::kTurns];  // of the keys and values that it writes; < 0: padding
  };

  const T* bias;
  const i32* positions;
  const i32* token_slots;
  const i32* block_tables;
  const float* inv_freq;
  T* q;
  T* kv_cache;
  i64 q_stride, block_stride;
  int num_heads, num_kv_heads, block_shift, max_blocks;
  const TensorMap* q_map;
  Pieces pieces;

  __device__ __forceinline__ void load(Ahead& ahead, int row0, int weight_row) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row0 + threadIdx.x % kWarpSize / 4 + 8 * half;
      ahead.position[half] = positions[min(row, pieces.M - 1)];
    }
    if (weight_row + BN <= num_heads * HEAD_DIM) return;  // q only
#pragma unroll
    for (int i = 0; i < Pieces::kTurns; i++) {
      const int row = min(row0 + Pieces::row_of(i), pieces.M - 1);
      const int slot = token_slots[row];
      ahead.block[i] = -1;
      if (slot >= 0) {
        ahead.block[i] = block_tables[slot * static_cast<i64>(max_blocks) +
                                      (positions[row] >> block_shift)];
      }
    }
  }

  __device__ __forceinline__ void store(float (&sum)[BN / 2], const Ahead& ahead, int row0,
                                        int weight_row) {
    if (bias != nullptr) add_bias<T, BN>(sum, bias, weight_row, pieces.num_cols);
    rotate(sum, ahead.position, num_heads + num_kv_heads - weight_row / HEAD_DIM);
    store_pieces<>(sum, ahead, row0, weight_row);
  }

 private:
  // Rotates the first `heads` of the tile.
  __device__ __forceinline__ void rotate(float (&sum)[BN / 2], const int (&position)[2],
                                         int heads) const {
    if (heads <= 0) return;
    const float* const freqs = inv_freq + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kHalf; j++) {
      const float2 freq = *reinterpret_cast<const float2*>(freqs + 8 * j);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const SinCos first = rope_angle(position[half], freq.x);
        const SinCos second = rope_angle(position[half], freq.y);
#pragma unroll
        for (int head = 0; head < BN / HEAD_DIM; head++) {
          if (head >= heads) break;
          const int low = 4 * (2 * kHalf * head + j) + 2 * half, high = low + 4 * kHalf;
          const float2 a = unpack2<T>(pack2<T>(sum[low], sum[low + 1]));
          const float2 b = unpack2<T>(pack2<T>(sum[high], sum[high + 1]));
          const float2 x = rotate_pair(a.x, b.x, first), y = rotate_pair(a.y, b.y, second);
          sum[low] = x.x, sum[low + 1] = y.x;
          sum[high] = x.y, sum[high + 1] = y.y;
        }
      }
    }
  }

  template <int PIECE = 0>
  __device__ __forceinline__ void store_pieces(const float (&sum)[BN / 2], const Ahead& ahead,
                                               int row0, int col0) {
    if constexpr (PIECE < Pieces::kPieces) {
      T* const first = q + (row0 + Pieces::row_of(0)) * q_stride;
      const int first_col = col0 + PIECE * Pieces::kPiece;
      const TensorMap* const map = first_col < num_heads * HEAD_DIM ? q_map : nullptr;
      pieces.template write<PIECE>(
          sum, row0, first_col, map, true, [&](int turn, int col) -> T* {
            const int head = col / HEAD_DIM - num_heads;  // of the cache, where V follows K
            if (head < 0) return first + turn * Pieces::kRows * q_stride + col;
            if (ahead.block[turn] < 0 || col >= pieces.num_cols) return nullptr;
            const int place = positions[row0 + Pieces::row_of(turn)] & ((1 << block_shift) - 1);
            const int tile_row = (head << block_shift) + place;
            return kv_cache + ahead.block[turn] * block_stride + tile_row * HEAD_DIM +
                   col % HEAD_DIM;
          });
      store_pieces<PIECE + 1>(sum, ahead, row0, col0);
    }
  }
};
