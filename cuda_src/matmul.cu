// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, for many rows of x (prefill).
//
// x [M, K] with row stride, weight [N, K] contiguous, bias [N], residual and y [M, N] with row
// strides; absent operands are null. K is a multiple of 8, rows of x and weight start on 16 bytes,
// rows of y and residual on two elements where their strides are even.
// Silu: weight rows are interleaved by 8 (8 gate rows, their 8 up rows, ...), y is [M, N / 2].
//
// A block computes a BM x BN tile of x weight^T with WARPS_M x WARPS_N warps. Tiles of 64 elements
// of K run through STAGES buffers in shared memory: cp.async fills STAGES - 1 of them ahead while
// tensor cores (mma.m16n8k16, float32 accumulators) work on the oldest. A tile row is 128 bytes,
// its 16-byte chunks permuted so that neither side meets bank conflicts.
//
// Bound: 2 M N K operations; from L2 come 2 M N K (1 / BM + 1 / BN) bytes. Blocks are numbered so
// that those running together share tiles of both operands: see tile_of_block.
#include "activation.cuh"
#include "mma.cuh"

constexpr int kTileK = 64;
constexpr int kChunk = 8;  // elements in 16 bytes
constexpr int kChunks = kTileK / kChunk;  // in a tile row
constexpr int kGroupTiles = 8;  // tiles along M that are worked on before the next column of tiles

// Tile coordinates (along M, along N) of this block: groups of kGroupTiles rows of tiles, within a
// group column by column. A weight tile is so used by the whole group at about the same time.
__device__ __forceinline__ int2 tile_of_block(int tiles_m, int tiles_n) {
  const int block = blockIdx.x;
  const int first_m = block / (kGroupTiles * tiles_n) * kGroupTiles;
  const int group_size = min(kGroupTiles, tiles_m - first_m);
  const int in_group = block - first_m * tiles_n;
  return {first_m + in_group % group_size, in_group / group_size};
}

// Starts copying rows [row0, row0 + ROWS) x columns [k0, k0 + kTileK) of a [num_rows, K] matrix.
// Rows beyond the matrix repeat its last one (their products are not stored), columns are zero.
template <typename T, int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const T* matrix, int row0, int num_rows,
                                          i64 stride, int k0, int K) {
  static_assert(THREADS % kChunks == 0 && ROWS % (THREADS / kChunks) == 0);
  const int chunk = threadIdx.x % kChunks;
  const int k = k0 + chunk * kChunk;
  const bool valid = k < K;
  const T* const column = matrix + (valid ? k : 0);
#pragma unroll
  for (int i = 0; i < ROWS; i += THREADS / kChunks) {
    const int row = i + threadIdx.x / kChunks;
    cp_async_16(tile + 16 * swizzled_chunk<kChunks>(row, chunk),
                column + min(row0 + row, num_rows - 1) * stride, valid);
  }
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

template <typename T, typename Out, int BM, int BN, int WARPS_M, int WARPS_N, int STAGES, bool SILU>
__global__ void __launch_bounds__(WARPS_M* WARPS_N* kWarpSize, 2)
    matmul_kernel(const T* x, const T* __restrict__ weight, const T* __restrict__ bias,
                  const T* residual, Out* y, int M, int N, int K, int x_stride,
                  int residual_stride, int y_stride) {
  start_next();
  constexpr int kThreads = WARPS_M * WARPS_N * kWarpSize;
  constexpr int kWarpM = BM / WARPS_M;
  constexpr int kWarpN = BN / WARPS_N;
  constexpr int kTilesM = kWarpM / 16;  // m16 fragments of a warp
  constexpr int kTilesN = kWarpN / 16;  // pairs of n8 fragments: one ldmatrix_x4 loads a pair
  constexpr u32 kStageBytes = (BM + BN) * kTileK * sizeof(T);
  constexpr u32 kWeightOffset = BM * kTileK * sizeof(T);
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0);

  extern __shared__ __align__(128) u8 shared[];  // STAGES x (x tile, weight tile)
  const u32 stages = smem_address(shared);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int2 tile = tile_of_block(ceil_div(M, BM), ceil_div(N, BN));
  const int row0 = tile.x * BM;
  const int col0 = tile.y * BN;
  const int warp_row = warp / WARPS_N * kWarpM;  // within the tile
  const int warp_col = warp % WARPS_N * kWarpN;

  const int num_tiles = ceil_div(K, kTileK);
  const auto load_x = [&](int t) {
    const u32 stage = stages + t % STAGES * kStageBytes;
    if (t < num_tiles) load_tile<T, BM, kThreads>(stage, x, row0, M, x_stride, t * kTileK, K);
  };
  const auto load_weight = [&](int t) {
    const u32 stage = stages + t % STAGES * kStageBytes + kWeightOffset;
    if (t < num_tiles) load_tile<T, BN, kThreads>(stage, weight, col0, N, K, t * kTileK, K);
  };

  float sum[kTilesM][2 * kTilesN][4] = {};
  u32 a[2][kTilesM][4];  // fragments, of this k16 step and of the next
  u32 b[2][kTilesN][4];
  const auto load_fragments = [&](int buffer, u32 stage, int step) {
#pragma unroll
    for (int m = 0; m < kTilesM; m++) {
      const int row = warp_row + m * 16 + lane % 16;
      ldmatrix_x4(a[buffer][m], stage + 16 * swizzled_chunk<kChunks>(row, step * 2 + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < kTilesN; n++) {
      const int row = warp_col + n * 16 + lane / 16 * 8 + lane % 8;
      ldmatrix_x4(b[buffer][n], stage + kWeightOffset +
                                    16 * swizzled_chunk<kChunks>(row, step * 2 + lane / 8 % 2));
    }
  };

  // The first weights are on their way before the kernel that makes x has ended.
#pragma unroll
  for (int t = 0; t < STAGES - 1; t++) load_weight(t);
  wait_for_previous();
#pragma unroll
  for (int t = 0; t < STAGES - 1; t++) {
    load_x(t);
    cp_async_commit();  // the weights are part of the first group
  }
  for (int t = 0; t < num_tiles; t++) {
    cp_async_wait<STAGES - 2>();
    // Tile t is there for all, and all are done with tile t - 1, whose buffer is filled next.
    __syncthreads();
    const u32 stage = stages + t % STAGES * kStageBytes;
    load_fragments(0, stage, 0);
    load_x(t + STAGES - 1);
    load_weight(t + STAGES - 1);
    cp_async_commit();  // an empty group too, so that the count of groups stays that of tiles
#pragma unroll
    for (int step = 0; step < kTileK / 16; step++) {
      const int now = step % 2;
      if (step + 1 < kTileK / 16) load_fragments(1 - now, stage, step + 1);
#pragma unroll
      for (int m = 0; m < kTilesM; m++) {
#pragma unroll
        for (int n = 0; n < kTilesN; n++) {
          mma_m16n8k16<T>(sum[m][2 * n], a[now][m], b[now][n][0], b[now][n][1]);
          mma_m16n8k16<T>(sum[m][2 * n + 1], a[now][m], b[now][n][2], b[now][n][3]);
        }
      }
    }
  }

  // Lane (group, pair) holds columns 2 pair, 2 pair + 1 of rows group and group + 8 of a fragment.
  // With silu, fragments along N alternate between gate and up of the same columns.
  constexpr int kParts = SILU ? 2 : 1;
  const int group = lane / 4;
  const int pair = lane % 4;
  const int num_cols = N / kParts;
#pragma unroll
  for (int n = 0; n < 2 * kTilesN; n += kParts) {
    const int weight_col = col0 + warp_col + n * 8;
    const int col = weight_col / kParts + pair * 2;
    if (col >= num_cols) continue;
    const bool both = col + 1 < num_cols;
    const bool paired = both && y_stride % 2 == 0 && residual_stride % 2 == 0;
    float2 offset[kParts] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        offset[part] = load2(bias + weight_col + part * 8 + pair * 2, both, both);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kTilesM; i++) {
      const int row = row0 + warp_row + i * 8 + group;
      if (row >= M) break;
      float2 v[kParts];
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        const float(&fragment)[4] = sum[i / 2][n + part];
        v[part] = {fragment[i % 2 * 2] + offset[part].x, fragment[i % 2 * 2 + 1] + offset[part].y};
      }
      if constexpr (SILU) v[0] = {silu(v[0].x) * v[1].x, silu(v[0].y) * v[1].y};
      if (residual != nullptr) {
        const float2 add =
            load2(residual + static_cast<i64>(row) * residual_stride + col, both, paired);
        v[0].x += add.x;
        v[0].y += add.y;
      }
      store2(y + static_cast<i64>(row) * y_stride + col, v[0], both, paired);
    }
  }
}
