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

// Copies of ROWS x DEPTH of a matrix into a buffer by all threads: each has a chunk of every
// kRows-th row. Addresses are worked out once a tile, and between rows they differ by 32 bits
// that all threads share (less than 4 GiB a tile), as instructions between products cost time.
template <typename T, int ROWS, int DEPTH, int THREADS> struct Copies {
  static constexpr int kRowChunks = DEPTH / kChunk;
  static constexpr int kRows = THREADS / kRowChunks;  // at a time
  static constexpr int kCopies = ROWS / kRows;  // of a thread
  static_assert(ROWS % kRows == 0);

  const T* matrix;
  int num_rows, stride;
  const u8* from;  // of this thread's first copy
  int valid;  // copies: chunks beyond the matrix become zeros and are not read

  __device__ __forceinline__ void begin_tile(int row0, int num_cols) {
    const int row = row0 + threadIdx.x / kRowChunks;
    from = reinterpret_cast<const u8*>(matrix + static_cast<i64>(row) * stride + column());
    valid = column() < num_cols ? ceil_div(num_rows - row, kRows) : 0;
  }

  // On to the next piece of K, of which num_cols are left.
  __device__ __forceinline__ void advance(int num_cols) {
    from += DEPTH * sizeof(T);
    if (column() >= num_cols) valid = 0;
  }

  __device__ __forceinline__ void start(int i, u32 buffer) const {
    const u32 step = stride * (kRows * sizeof(T));
    const u32 to = buffer + 16 * swizzled_chunk<kRowChunks>(threadIdx.x / kRowChunks,
                                                            threadIdx.x % kRowChunks);
    cp_async_16(to + i * (kRows * DEPTH * sizeof(T)), from + i * step, i < valid);
  }

 private:
  // Of this thread, within the piece.
  __device__ __forceinline__ static int column() { return threadIdx.x % kRowChunks * kChunk; }
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
  constexpr int kCopies = CopiesOfX::kCopies + CopiesOfWeight::kCopies;
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
  int copy_tile, copy_k;
  u32 write;
  CopiesOfX copies_of_x = {x, M, x_stride};
  CopiesOfWeight copies_of_weight = {weight, N, K};
  const auto begin_tile = [&] {
    const int2 at = tile_of_block(min(copy_tile, num_tiles - 1), tiles_m, tiles_n);
    const int num_cols = copy_tile < num_tiles ? K : 0;  // after the last tile only zeros
    copy_k = 0;
    copies_of_x.begin_tile(at.x * BM, num_cols);
    copies_of_weight.begin_tile(at.y * BN, num_cols);
  };
  const auto begin_copies = [&] {
    copy_tile = blockIdx.x;
    write = stages;
    begin_tile();
  };
  const auto advance_copies = [&] {
    write += kStageBytes;
    if (write == end) write = stages;
    copy_k += DEPTH;
    copies_of_x.advance(K - copy_k);
    copies_of_weight.advance(K - copy_k);
    if (copy_k >= K) {
      copy_tile += gridDim.x;
      begin_tile();
    }
  };
  const auto copy_x = [&](int i) { copies_of_x.start(i, write); };
  const auto copy_weight = [&](int i) { copies_of_weight.start(i, write + kWeightOffset); };

  // The first weights are on their way before the kernel that makes x has ended.
  begin_copies();
#pragma unroll 1
  for (int t = 0; t < STAGES - 1; t++) {
#pragma unroll
    for (int i = 0; i < CopiesOfWeight::kCopies; i++) copy_weight(i);
    advance_copies();
  }
  wait_for_previous();
  begin_copies();
#pragma unroll 1
  for (int t = 0; t < STAGES - 1; t++) {
#pragma unroll
    for (int i = 0; i < CopiesOfX::kCopies; i++) copy_x(i);
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
    // In the order in which products want them.
    ldmatrix_x4(a[buffer][0], read + (a_offset ^ (step * 32)));
#pragma unroll
    for (int n = 0; n < kTilesN; n++) {
      ldmatrix_x4(b[buffer][n], read + (b_offset ^ (step * 32)) + n * (16 * kRowBytes));
    }
#pragma unroll
    for (int m = 1; m < kTilesM; m++) {
      ldmatrix_x4(a[buffer][m], read + (a_offset ^ (step * 32)) + m * (16 * kRowBytes));
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
#pragma unroll
          for (int i = step; i < kCopies; i += kSteps - 1) {
            if (i < CopiesOfX::kCopies) {
              copy_x(i);
            } else {
              copy_weight(i - CopiesOfX::kCopies);
            }
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
