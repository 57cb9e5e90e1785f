// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, by large tiles, on the tensor cores that
// all GPUs have.
//
// Operands: matmul_tile.cuh. Blocks stay and compute BM x BN tiles of x weight^T, one after another,
// with WARPS_M x WARPS_N warps. Pieces of DEPTH elements of K run through STAGES buffers in shared
// memory: cp.async fills STAGES - 1 of them ahead while tensor cores (mma.m16n8k16, float32
// accumulators) work on the oldest, and goes on with the next tile while sums are stored. A row in
// a buffer is 64 or 128 bytes, its 16-byte chunks permuted so that neither side meets bank
// conflicts. Fragments are loaded a k16 step ahead, also from one piece to the next.
//
// Bound: 2 M N K operations, of which mma.sync reaches 0.62 of what wgmma does on Hopper; from L2
// come 2 M N K (1 / BM + 1 / BN) bytes. Tiles are numbered so that those that are worked on
// together share both operands: see tile_of_block.
#include "row_store.cuh"

// Copies of ROWS x DEPTH of a matrix into a buffer by all threads, part by part.
template <typename T, int ROWS, int DEPTH, int THREADS> struct Copies {
  static constexpr int kRowChunks = DEPTH / kChunk;
  static constexpr int kRows = THREADS / kRowChunks;  // at a time
  static_assert(ROWS % kRows == 0);

  // Rows and columns beyond the matrix become zeros and are not read.
  static __device__ __forceinline__ void start(int part, int parts, u32 buffer, const T* matrix,
                                               int row0, int num_rows, i64 stride, int k0, int K) {
    const int chunk = threadIdx.x % kRowChunks;
    const int row = threadIdx.x / kRowChunks;
    const int k = k0 + chunk * kChunk;
    const T* const from = matrix + k;
    const u32 to = buffer + 16 * swizzled_chunk<kRowChunks>(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS / kRows; i++) {
      const int r = row0 + row + i * kRows;
      if (i % parts == part) {
        cp_async_16(to + i * (kRows * DEPTH * sizeof(T)), from + r * stride, k < K && r < num_rows);
      }
    }
  }
};

template <typename T, typename Out, int BM, int BN, int WARPS_M, int WARPS_N, int DEPTH, int STAGES,
          bool SILU>
__global__ void __launch_bounds__(WARPS_M* WARPS_N* kWarpSize, WARPS_M* WARPS_N > 4 ? 1 : 2)
    matmul_large_kernel(const T* x, const T* __restrict__ weight, const T* __restrict__ bias,
                        const T* residual, Out* y, int M, int N, int K, int x_stride,
                        int residual_stride, int y_stride) {
  start_next();
  constexpr int kThreads = WARPS_M * WARPS_N * kWarpSize;
  constexpr int kWarpM = BM / WARPS_M;
  constexpr int kWarpN = BN / WARPS_N;
  constexpr int kTilesM = kWarpM / 16;  // m16 fragments of a warp
  constexpr int kTilesN = kWarpN / 16;  // pairs of n8 fragments: one ldmatrix_x4 loads a pair
  constexpr int kSteps = DEPTH / 16;
  constexpr u32 kRowBytes = DEPTH * sizeof(T);
  constexpr u32 kWeightOffset = BM * kRowBytes;
  constexpr u32 kStageBytes = (BM + BN) * kRowBytes;
  using CopiesOfX = Copies<T, BM, DEPTH, kThreads>;
  using CopiesOfWeight = Copies<T, BN, DEPTH, kThreads>;
  using Pieces = RowPieces<Out, kWarpN, SILU, false>;
  using Store = RowStore<T, Out, kWarpN, SILU, Pieces>;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kSteps % 2 == 0);

  extern __shared__ __align__(128) u8 shared[];  // STAGES x (x tile, weight tile), warps' results
  const u32 stages = smem_address(shared);
  const u32 end = stages + STAGES * kStageBytes;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = warp / WARPS_N * kWarpM;  // within the tile
  const int warp_col = warp % WARPS_N * kWarpN;
  const int tiles_m = ceil_div(M, BM);
  const int tiles_n = ceil_div(N, BN);
  const int num_tiles = tiles_m * tiles_n;

  // What is copied next.
  int copy_tile = blockIdx.x;
  int2 copy_at = tile_of_block(copy_tile, tiles_m, tiles_n);
  int copy_k = 0;
  u32 write = stages;
  const auto advance_copies = [&] {
    write += kStageBytes;
    if (write == end) write = stages;
    copy_k += DEPTH;
    if (copy_k >= K) {
      copy_k = 0;
      copy_tile += gridDim.x;
      if (copy_tile < num_tiles) copy_at = tile_of_block(copy_tile, tiles_m, tiles_n);
    }
  };
  const auto copy_x = [&](int part, int parts) {
    if (copy_tile < num_tiles) {
      CopiesOfX::start(part, parts, write, x, copy_at.x * BM, M, x_stride, copy_k, K);
    }
  };
  const auto copy_weight = [&](int part, int parts) {
    if (copy_tile < num_tiles) {
      CopiesOfWeight::start(part, parts, write + kWeightOffset, weight, copy_at.y * BN, N, K,
                            copy_k, K);
    }
  };

  // The first weights are on their way before the kernel that makes x has ended.
#pragma unroll
  for (int t = 0; t < STAGES - 1; t++) {
    copy_weight(0, 1);
    advance_copies();
  }
  wait_for_previous();
  copy_tile = blockIdx.x;
  copy_at = tile_of_block(copy_tile, tiles_m, tiles_n);
  copy_k = 0;
  write = stages;
#pragma unroll
  for (int t = 0; t < STAGES - 1; t++) {
    copy_x(0, 1);
    cp_async_commit();  // the weights are part of the first group
    advance_copies();
  }

  // Fragments of this k16 step and of the next. The chunks of a step are those of the first one
  // with its bits flipped.
  constexpr int kRowChunks = DEPTH / kChunk;
  const u32 a_offset = 16 * swizzled_chunk<kRowChunks>(warp_row + lane % 16, lane / 16);
  const u32 b_offset =
      kWeightOffset +
      16 * swizzled_chunk<kRowChunks>(warp_col + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  u32 a[2][kTilesM][4];
  u32 b[2][kTilesN][4];
  u32 read = stages;
  const auto load_fragments = [&](int buffer, int step) {
#pragma unroll
    for (int m = 0; m < kTilesM; m++) {
      ldmatrix_x4(a[buffer][m], read + (a_offset ^ (step * 32)) + m * (16 * kRowBytes));
    }
#pragma unroll
    for (int n = 0; n < kTilesN; n++) {
      ldmatrix_x4(b[buffer][n], read + (b_offset ^ (step * 32)) + n * (16 * kRowBytes));
    }
  };
  // A stage is there for all, and all have loaded the last fragments of the one before, whose
  // buffer is filled next.
  const auto wait_for_stage = [&] {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
  };

  wait_for_stage();
  load_fragments(0, 0);
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    float sum[kTilesM][kWarpN / 2] = {};
    for (int k = 0; k < K; k += DEPTH) {
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        const int now = step % 2;
        if (step + 1 < kSteps) {
          load_fragments(1 - now, step + 1);
          if (copy_tile < num_tiles) {
            copy_x(step, kSteps - 1);
            copy_weight(step, kSteps - 1);
          }
          if (step + 2 == kSteps) {
            cp_async_commit();  // an empty group too: the count of groups is that of stages
            advance_copies();
          }
        } else {  // the last fragments are loaded: on to the next stage
          wait_for_stage();
          read += kStageBytes;
          if (read == end) read = stages;
          load_fragments(1 - now, 0);
        }
#pragma unroll
        for (int m = 0; m < kTilesM; m++) {
#pragma unroll
          for (int n = 0; n < 2 * kTilesN; n++) {
            const u32(&pair)[4] = b[now][n / 2];
            mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(sum[m][4 * n]), a[now][m],
                            pair[n % 2 * 2], pair[n % 2 * 2 + 1]);
          }
        }
      }
    }

    const int2 at = tile_of_block(tile, tiles_m, tiles_n);
    Store store = {bias, residual, y, residual_stride, y_stride, nullptr, {M, SILU ? N / 2 : N}};
    store.pieces.use(end + warp * Pieces::kBytes);
#pragma unroll
    for (int m = 0; m < kTilesM; m++) {
      const int row0 = at.x * BM + warp_row + m * 16, weight_row = at.y * BN + warp_col;
      typename Store::Ahead residual_of_rows;
      store.load(residual_of_rows, row0, weight_row);
      store.store(sum[m], residual_of_rows, row0, weight_row);
    }
  }
  cp_async_wait<0>();
}
