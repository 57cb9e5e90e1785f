// The sums of a tile whose K is shared out among `split` blocks of a cluster: each block sends its
// partial sums of a row to the block that adds this row up and stores it. sm_90 and newer.
//
// Rows go in groups of 8, dealt out to the ranks in turn. A block receives, from each rank, each of
// its groups as [BN / 16][8 rows][4]{columns c, c + 1, c + 8, c + 9}: what a warp sends at a time is
// 512 bytes in one piece. The bytes report to a barrier, so that nobody waits for the whole cluster.
#pragma once

#include "matmul_tile.cuh"
#include "tma.cuh"

template <int BN> struct SplitSum {
  static constexpr u32 kGroupBytes = 8 * BN * sizeof(float);

  u32 received;  // shared addresses
  u32 barrier;
  int rank, split;  // in K, over the blocks of the cluster
  int rows;  // of the tile that are rows of x

  __device__ __forceinline__ int groups() const { return ceil_div(rows, 8); }
  __device__ __forceinline__ int own_groups() const {
    return ceil_div(max(groups() - rank, 0), split);
  }
  __device__ __forceinline__ u32 group_at(int from_rank, int own) const {
    return received + (from_rank * ceil_div(groups(), split) + own) * kGroupBytes;
  }

  // Before the cluster meets for the first time.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      fence_barrier_init();
      barrier_expect(barrier, own_groups() * split * kGroupBytes);
    }
  }

  // Sends a warp's 16 rows of the tile, from `row` on. All blocks must be done with their buffers.
  __device__ __forceinline__ void send(const float (&sum)[BN / 2], int row) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int group = row / 8 + half;
      if (group >= groups()) return;
      const int owner = group % split;
      const u32 to = address_in(group_at(rank, group / split), owner) + threadIdx.x % kWarpSize * 16;
      const u32 at = address_in(barrier, owner);
#pragma unroll
      for (int j = 0; j < BN / 16; j++) {
        const int i = 8 * j + 2 * half;
        store_async(to + 512 * j, make_float4(sum[i], sum[i + 1], sum[i + 4], sum[i + 5]), at);
      }
    }
  }

  // The sums of columns c, c + 1, c + 8, c + 9 with c = 16 * (quad / 4) + 2 * (quad % 4), of the
  // row-th of this block's rows, added in the order of the ranks: the result is reproducible.
  __device__ __forceinline__ float4 total(int row, int quad) const {
    const u32 at = quad / 4 * 512 + row % 8 * 64 + quad % 4 * 16;
    float4 part[kMaxCluster];
#pragma unroll
    for (int r = 0; r < kMaxCluster; r++) {
      part[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (r < split) part[r] = load_shared_4(group_at(r, row / 8) + at);
    }
    float4 sum = part[0];
#pragma unroll
    for (int r = 1; r < kMaxCluster; r++) {
      sum = {sum.x + part[r].x, sum.y + part[r].y, sum.z + part[r].z, sum.w + part[r].w};
    }
    return sum;
  }

  // Waits for the other blocks and stores this block's rows. The tile begins at row0 and col0 (a row
  // of weight).
  template <typename T, typename Out, int THREADS, bool SILU>
  __device__ __forceinline__ void store(const T* bias, const T* residual, Out* y, int row0, int col0,
                                        int N, i64 residual_stride, i64 y_stride) const {
    constexpr int kQuads = BN / 4;  // in a row
    constexpr int kPairs = SILU ? 1 : 2;  // of columns of y in a quad
    const int num_cols = SILU ? N / 2 : N;
    const bool pairable = y_stride % 2 == 0 && residual_stride % 2 == 0;
    struct Add {
      float2 pair[kPairs];
    };
    const auto row_of = [&](int i) {  // in the tile
      const int row = i / kQuads;
      return (row / 8 * split + rank) * 8 + row % 8;
    };
    const auto col_of = [&](int i, int pair) {
      const int quad = i % kQuads;
      return SILU ? col0 / 2 + quad * 2 : col0 + quad / 4 * 16 + quad % 4 * 2 + 8 * pair;
    };
    const auto load_residual = [&](int i) {
      Add add = {};
      if (!SILU && residual != nullptr && row_of(i) < rows) {
#pragma unroll
        for (int pair = 0; pair < kPairs; pair++) {
          const int col = col_of(i, pair);
          const bool both = col + 1 < num_cols;
          const T* const from = residual + (row0 + row_of(i)) * residual_stride + col;
          if (col < num_cols) add.pair[pair] = load2(from, both, both && pairable);
        }
      }
      return add;
    };

    Add add = load_residual(threadIdx.x);  // always one ahead
    barrier_wait_cluster(barrier, 0);
    for (int i = threadIdx.x; i < own_groups() * 8 * kQuads; i += THREADS) {
      const Add next = load_residual(i + THREADS);
      if (row_of(i) < rows) {
        const float4 sum = total(i / kQuads, i % kQuads);
        float2 v[2] = {{sum.x, sum.y}, {sum.z, sum.w}};
        if (bias != nullptr) {
#pragma unroll
          for (int part = 0; part < 2; part++) {
            const int col = col0 + i % kQuads / 4 * 16 + i % 4 * 2 + 8 * part;
            const bool both = col + 1 < N;
            const float2 offset = col < N ? load2(bias + col, both, both) : float2{};
            v[part] = {v[part].x + offset.x, v[part].y + offset.y};
          }
        }
        if constexpr (SILU) v[0] = {silu(v[0].x) * v[1].x, silu(v[0].y) * v[1].y};
#pragma unroll
        for (int pair = 0; pair < kPairs; pair++) {
          const int col = col_of(i, pair);
          if (col >= num_cols) continue;
          const bool both = col + 1 < num_cols;
          store2(y + (row0 + row_of(i)) * y_stride + col,
                 make_float2(v[pair].x + add.pair[pair].x, v[pair].y + add.pair[pair].y), both,
                 both && pairable);
        }
      }
      add = next;
    }
  }
};
