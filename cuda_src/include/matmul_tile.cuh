// What the tiled products share: loading tiles, numbering them, and storing a tile of results.
//
// Operands: x [M, K] with row stride, weight [N, K] contiguous, bias [N], residual and y [M, N]
// with row strides; absent operands are null. K is a multiple of 8, rows of x and weight start on
// 16 bytes, rows of y and residual on two elements where their strides are even.
// Silu: weight rows are interleaved by 8 (8 gate rows, their 8 up rows, ...), y is [M, N / 2].
#pragma once

#include "activation.cuh"
#include "cluster.cuh"
#include "mma.cuh"

constexpr int kTileK = 64;
constexpr int kChunk = 8;  // elements in 16 bytes
constexpr int kChunks = kTileK / kChunk;  // in a tile row
constexpr int kGroupTiles = 8;  // tiles along M that are worked on before the next column of tiles

// Tile coordinates (along M, along N) of a block: groups of kGroupTiles rows of tiles, within a
// group column by column. A weight tile is so used by the whole group at about the same time.
__device__ __forceinline__ int2 tile_of_block(int block, int tiles_m, int tiles_n,
                                              int group = kGroupTiles) {
  const int first_m = block / (group * tiles_n) * group;
  const int group_size = min(group, tiles_m - first_m);
  const int in_group = block - first_m * tiles_n;
  return {first_m + in_group % group_size, in_group / group_size};
}

// Starts copying rows [row0, row0 + ROWS) x columns [k0, k0 + kTileK) of a [num_rows, K] matrix.
// Rows beyond the matrix repeat its last one (their products are not stored), columns are zero.
template <typename T, int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const T* matrix, int row0, int num_rows,
                                          i64 stride, int k0, int K) {
  constexpr int kRows = THREADS / kChunks;  // at a time
  static_assert(THREADS % kChunks == 0 && (ROWS % kRows == 0 || ROWS < kRows));
  const int chunk = threadIdx.x % kChunks;
  const int k = k0 + chunk * kChunk;
  const bool valid = k < K;
  const T* const column = matrix + (valid ? k : 0);
#pragma unroll
  for (int i = 0; i < ROWS; i += kRows) {
    const int row = i + threadIdx.x / kChunks;
    if (ROWS >= kRows || row < ROWS) {
      cp_async_16(tile + 16 * swizzled_chunk<kChunks>(row, chunk),
                  column + min(row0 + row, num_rows - 1) * stride, valid);
    }
  }
}

__device__ __forceinline__ void store_shared(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ float2 load_shared_2(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_shared_4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Two neighbouring elements: as one access if `paired`, else `both` or only the first.
template <typename Out>
__device__ __forceinline__ void store2(Out* p, float2 v, bool both, bool paired) {
  if (paired) {
    *reinterpret_cast<Vec<Out, 2>*>(p) = {from_float<Out>(v.x), from_float<Out>(v.y)};
  } else {
    p[0] = from_float<Out>(v.x);
    if (both) p[1] = from_float<Out>(v.y);
  }
}

template <typename T>
__device__ __forceinline__ float2 load2(const T* p, bool both, bool paired) {
  if (paired) return unpack2<T>(*reinterpret_cast<const u32*>(p));
  return {to_float(p[0]), both ? to_float(p[1]) : 0.0f};
}

// Two partial sums at this shared address, added up over the `split` blocks of the cluster in the
// order of their ranks, so that the result is reproducible.
__device__ __forceinline__ float2 sum_of_ranks(u32 address, int split) {
  if (split == 1) return load_shared_2(address);
  float2 part[kMaxCluster];
#pragma unroll
  for (int r = 0; r < kMaxCluster; r++) part[r] = load_from_rank(address, r, r < split);
  float2 sum = part[0];
#pragma unroll
  for (int r = 1; r < kMaxCluster; r++) sum = {sum.x + part[r].x, sum.y + part[r].y};
  return sum;
}

// Stores the results of a tile whose BM x BN partial sums (rows of x, weight rows, PITCH floats a
// row) lie at the same shared address in all `split` blocks of the cluster; each block takes every
// split-th row. The tile begins at row0 of x and col0 of weight.
template <typename T, typename Out, int BM, int BN, int PITCH, int THREADS, bool SILU>
__device__ __forceinline__ void store_tile(u32 tile, int rank, int split, const T* bias,
                                           const T* residual, Out* y, int row0, int col0, int M,
                                           int N, int residual_stride, int y_stride) {
  constexpr int kParts = SILU ? 2 : 1;
  constexpr int kPairs = BN / kParts / 2;  // of columns in a row of the tile
  const int num_cols = N / kParts;
  const int num_rows = min(BM, M - row0);
  const bool pairable = y_stride % 2 == 0 && residual_stride % 2 == 0;
  const auto row_of = [&](int i) { return rank + i / kPairs * split; };  // in the tile
  const auto col_of = [&](int i) { return col0 / kParts + i % kPairs * 2; };
  const auto load_residual = [&](int i) {
    const int col = col_of(i);
    if (residual == nullptr || row_of(i) >= num_rows || col >= num_cols) return float2{};
    const bool both = col + 1 < num_cols;
    return load2(residual + static_cast<i64>(row0 + row_of(i)) * residual_stride + col, both,
                 both && pairable);
  };

  float2 add = load_residual(threadIdx.x);  // always one ahead
  if (split > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  for (int i = threadIdx.x; row_of(i) < num_rows; i += THREADS) {
    const int row = row_of(i);
    const int col = col_of(i);
    const float2 next_add = load_residual(i + THREADS);
    if (col < num_cols) {
      const bool both = col + 1 < num_cols;
      const int pair = i % kPairs * 2;
      const int weight_col = SILU ? pair / 8 * 16 + pair % 8 : pair;  // in the tile
      float2 v[kParts];
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        v[part] = sum_of_ranks(tile + 4 * (row * PITCH + weight_col + part * 8), split);
        if (bias != nullptr) {
          const float2 offset = load2(bias + col0 + weight_col + part * 8, both, both);
          v[part] = {v[part].x + offset.x, v[part].y + offset.y};
        }
      }
      if constexpr (SILU) v[0] = {silu(v[0].x) * v[1].x, silu(v[0].y) * v[1].y};
      store2(y + static_cast<i64>(row0 + row) * y_stride + col,
             make_float2(v[0].x + add.x, v[0].y + add.y), both, both && pairable);
    }
    add = next_add;
  }
  if (split > 1) cluster_sync();  // a block's shared memory lives while others read it
}
