// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, for up to 32 rows of x on Hopper's tensor
// cores (sm_90a). matmul_hopper.cu has those for more.
//
// Operands: matmul_tile.cuh. The product is computed transposed: a block's tile is 64 weight rows by
// BM rows of x, so that few rows of x waste nothing. Tiles of 64 elements of K run through STAGES
// buffers in shared memory, filled ahead by cp.async, multiplied from there by wgmma. `split` blocks
// of a cluster share out K, so that every SM streams weights also where a product has few tiles, and
// add up their sums at the end.
//
// Bound: the weights' 2 N K bytes from memory.
#include "matmul_tile.cuh"
#include "wgmma.cuh"

template <typename T, typename Out, int BM, int STAGES, bool SILU>
__global__ void __launch_bounds__(128, 2)
    matmul_wide_kernel(const T* x, const T* __restrict__ weight, const T* __restrict__ bias,
                       const T* residual, Out* y, int M, int N, int K, int x_stride,
                       int residual_stride, int y_stride, int split) {
  start_next();
  constexpr int kThreads = 128;
  constexpr int kCols = 64;  // weight rows of a tile
  constexpr int kPitch = kCols + 4;  // of a row of partial sums: a fragment's lanes hit all banks
  constexpr u32 kStageBytes = (kCols + BM) * kTileK * sizeof(T);
  constexpr u32 kXOffset = kCols * kTileK * sizeof(T);
  constexpr int kAhead = STAGES - 1;
  static_assert(kAhead >= 2 && BM * kPitch * sizeof(float) <= STAGES * kStageBytes);

  extern __shared__ __align__(1024) u8 shared[];  // STAGES x (weight tile, x tile)
  const u32 stages = smem_address(shared);
  const int rank = blockIdx.x % split;
  const int2 tile = tile_of_block(blockIdx.x / split, ceil_div(M, BM), ceil_div(N, kCols));
  const int row0 = tile.x * BM;
  const int col0 = tile.y * kCols;
  const int all_tiles = ceil_div(K, kTileK);
  const int first = all_tiles * rank / split;
  const int last = all_tiles * (rank + 1) / split;

  const auto stage = [&](int t) { return stages + (t - first) % STAGES * kStageBytes; };
  const auto load_weight = [&](int t) {
    if (t < last) load_tile<T, kCols, kThreads>(stage(t), weight, col0, N, K, t * kTileK, K);
  };
  const auto load_x = [&](int t) {
    const u32 dst = stage(t) + kXOffset;
    if (t < last) load_tile<T, BM, kThreads>(dst, x, row0, M, x_stride, t * kTileK, K);
  };

  // The first weights are on their way before the kernel that makes x has ended.
#pragma unroll
  for (int t = 0; t < kAhead; t++) load_weight(first + t);
  wait_for_previous();
#pragma unroll
  for (int t = 0; t < kAhead; t++) {
    load_x(first + t);
    cp_async_commit();  // the weights are part of the first group
  }

  float sum[BM / 2] = {};
  for (int t = first; t < last; t++) {
    cp_async_wait<kAhead - 1>();
    fence_async();
    __syncthreads();  // tile t is there for all; all have waited for the products of tile t - 1
    load_weight(t + kAhead);
    load_x(t + kAhead);
    cp_async_commit();  // an empty group too, so that the count of groups stays that of tiles
    const u64 weight_tile = wgmma_tile(stage(t));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; step++) {
      wgmma<T, BM>(sum, wgmma_further(weight_tile, step * 32),
                   wgmma_further(weight_tile, kXOffset + step * 32));
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  cp_async_wait<0>();
  __syncthreads();  // the buffers are free for the sums

  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < BM / 2; i++) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int col = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    store_shared(stages + 4 * (row * kPitch + col), sum[i]);
  }
  store_tile<T, Out, BM, kCols, kPitch, kThreads, SILU>(
      stages, rank, split, bias, residual, y, row0, col0, M, N, residual_stride, y_stride);
}
