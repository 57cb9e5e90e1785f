// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, on the tensor cores that all GPUs have.
// matmul_large.cu is for products with many tiles.
//
// Operands: matmul_tile.cuh. A block computes a BM x BN tile of x weight^T with WARPS_M x WARPS_N
// warps. Tiles of 64 elements of K run through STAGES buffers in shared memory: cp.async fills
// STAGES - 1 of them ahead while tensor cores (mma.m16n8k16, float32 accumulators) work on the
// oldest. A tile row is 128 bytes, its 16-byte chunks permuted so that neither side meets bank
// conflicts. From sm_90 on, `split` blocks of a cluster may share out K, so that every SM streams
// weights also where a product has few tiles; elsewhere `split` is 1.
//
// Bound: 2 M N K operations; from L2 come 2 M N K (1 / BM + 1 / BN) bytes. Blocks are numbered so
// that those running together share tiles of both operands: see tile_of_block.
#include "matmul_tile.cuh"

template <typename T, typename Out, int BM, int BN, int WARPS_M, int WARPS_N, int STAGES, bool SILU>
__global__ void __launch_bounds__(WARPS_M* WARPS_N* kWarpSize, 2)
    matmul_kernel(const T* x, const T* __restrict__ weight, const T* __restrict__ bias,
                  const T* residual, Out* y, int M, int N, int K, int x_stride,
                  int residual_stride, int y_stride, int split) {
  start_next();
  constexpr int kThreads = WARPS_M * WARPS_N * kWarpSize;
  constexpr int kWarpM = BM / WARPS_M;
  constexpr int kWarpN = BN / WARPS_N;
  constexpr int kTilesM = kWarpM / 16;  // m16 fragments of a warp
  constexpr int kTilesN = kWarpN / 16;  // pairs of n8 fragments: one ldmatrix_x4 loads a pair
  constexpr u32 kStageBytes = (BM + BN) * kTileK * sizeof(T);
  constexpr u32 kWeightOffset = BM * kTileK * sizeof(T);
  constexpr int kPitch = BN + 8;  // of a row of sums: a fragment's lanes hit all banks
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0);
  static_assert(BM * kPitch * sizeof(float) <= STAGES * kStageBytes);

  extern __shared__ __align__(128) u8 shared[];  // STAGES x (x tile, weight tile)
  const u32 stages = smem_address(shared);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int rank = blockIdx.x % split;
  const int2 tile = tile_of_block(blockIdx.x / split, ceil_div(M, BM), ceil_div(N, BN));
  const int row0 = tile.x * BM;
  const int col0 = tile.y * BN;
  const int warp_row = warp / WARPS_N * kWarpM;  // within the tile
  const int warp_col = warp % WARPS_N * kWarpN;

  const int all_tiles = ceil_div(K, kTileK);
  const int first = all_tiles * rank / split;
  const int last = all_tiles * (rank + 1) / split;
  const auto stage_of = [&](int t) { return stages + (t - first) % STAGES * kStageBytes; };
  const auto load_x = [&](int t) {
    if (t < last) load_tile<T, BM, kThreads>(stage_of(t), x, row0, M, x_stride, t * kTileK, K);
  };
  const auto load_weight = [&](int t) {
    const u32 dst = stage_of(t) + kWeightOffset;
    if (t < last) load_tile<T, BN, kThreads>(dst, weight, col0, N, K, t * kTileK, K);
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
  for (int t = 0; t < STAGES - 1; t++) load_weight(first + t);
  wait_for_previous();
#pragma unroll
  for (int t = 0; t < STAGES - 1; t++) {
    load_x(first + t);
    cp_async_commit();  // the weights are part of the first group
  }
  for (int t = first; t < last; t++) {
    cp_async_wait<STAGES - 2>();
    // Tile t is there for all, and all are done with tile t - 1, whose buffer is filled next.
    __syncthreads();
    const u32 stage = stage_of(t);
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

  cp_async_wait<0>();
  __syncthreads();  // the buffers are free for the sums

#pragma unroll
  for (int m = 0; m < kTilesM; m++) {
#pragma unroll
    for (int n = 0; n < 2 * kTilesN; n++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = warp_row + m * 16 + half * 8 + lane / 4;
        const int col = warp_col + n * 8 + lane % 4 * 2;
        store_shared(stages + 4 * (row * kPitch + col),
                     make_float2(sum[m][n][half * 2], sum[m][n][half * 2 + 1]));
      }
    }
  }
  store_tile<T, Out, BM, BN, kPitch, kThreads, SILU>(
      stages, rank, split, bias, residual, y, row0, col0, M, N, residual_stride, y_stride);
}
