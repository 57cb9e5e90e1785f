// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, for few rows of x (decode). With NORM,
// x stands for its RMSNorm: y = rsqrt(mean(x^2) + eps) (x * norm_weight) weight^T ...
//
// x [M, K] with row stride, weight [N, K] contiguous, bias [N], norm_weight [K], residual and y
// [M, N] with row strides; absent operands are null. K is a multiple of 8, rows of x and weight
// start on 16 bytes. Silu: weight rows are interleaved by 8 (8 gate rows, their 8 up rows, ...), y
// is [M, N / 2].
//
// Bound: the weights are read from memory exactly once, 2 N K bytes. A block owns tiles of 16
// weight rows, each tile one contiguous piece of memory; its warps (and those of the `split` blocks
// of a cluster) split K into equal runs of 32-element steps. The product is computed transposed,
// weight rows as the 16 rows of mma.m16n8k16 and rows of x as its columns. A sum does not care how
// k is numbered: each lane takes the 8 neighbouring elements of one 16-byte load for two k16
// products, of weight and x alike, so nothing is shuffled or converted. Shared memory serves each
// lane as a queue of its own cp.async loads, kRing steps long, which runs on from tile to tile; x
// stays in registers. Columns beyond M cost nothing but idle tensor cores.
//
// The norm delays no weight: each lane squares the elements of x that it multiplies, and the root
// of the mean is applied to the sums. x * norm_weight is rounded once, as the normed x would be.
//
// Partial sums are added in order of k through shared memory: the order of the whole sum depends on
// K alone, not on M or ROWS.
//
// While their weights are on their way, the blocks bring `ahead_bytes` of later weights to L2.
#include "activation.cuh"
#include "cluster.cuh"
#include "mma.cuh"
#include "prefetch.cuh"

#ifndef MAX_WARPS
#define MAX_WARPS 8
#define RING 8
#define MIN_BLOCKS 3
#define COPY cp_async_16
#endif
constexpr int kTileCols = 16;  // weight rows (columns of y) of a tile
constexpr int kMaxWarps = MAX_WARPS;
constexpr int kStepK = 32;  // elements of K that four lanes cover with one 16-byte load each
constexpr int kRing = RING;  // steps whose weights a warp has in flight
constexpr int kStepBytes = 2 * 16 * kWarpSize;  // of weights
constexpr int kPitch = 20;  // of a row of partial sums: the lanes of a fragment hit all banks once
constexpr int kXRows = 4;  // of x that a warp reads at a time

// Volatile, so that it stays ahead of the waits for weights that follow it.
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Two elements of x times their weights, rounded; adds their squares.
template <typename T> __device__ __forceinline__ u32 scaled(u32 x, u32 scale, float& squares) {
  const float2 v = unpack2<T>(x), s = unpack2<T>(scale);
  squares = fmaf(v.x, v.x, squares);
  squares = fmaf(v.y, v.y, squares);
  return pack2<T>(v.x * s.x, v.y * s.y);
}

template <typename T, typename Out, int ROWS, int SPLIT, bool SILU, bool NORM>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, ROWS == 8 ? MIN_BLOCKS : 1)
    matmul_few_rows_kernel(const T* x, const T* __restrict__ weight, const T* __restrict__ bias,
                           const T* __restrict__ norm_weight, const T* residual, Out* y, int M,
                           int N, int K, int x_stride, int residual_stride, int y_stride, float eps,
                           const u8* __restrict__ ahead, i32 ahead_bytes) {
  start_next();
  // Of each warp: its queue [kRing][2][lane] of 16 bytes, its run of x [step][M][4] and, for a
  // norm, of norm_weight [step][4]. Then partial sums [2][warp][M][kPitch] of the tile at hand and
  // the one before, and for a norm the sums of squares [warp][M].
  extern __shared__ __align__(128) u8 shared[];
  __shared__ float block_sum[SPLIT > 1 ? ROWS : 1][kPitch];  // for the rest of the cluster
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  const int group = lane / 4;
  const int pair = lane % 4;
  const int rank = blockIdx.x % SPLIT;
  const int clusters = gridDim.x / SPLIT;
  const int tiles = ceil_div(N, kTileCols);
  const int run = ceil_div(ceil_div(K, kStepK), num_warps * SPLIT);  // steps of a warp
  const int first = (rank * num_warps + warp) * run * kStepK;

  u8* const own = shared + warp * (kRing * kStepBytes + (M + NORM) * run * 2 * kStepK);
  u8* const x_run = own + kRing * kStepBytes;
  u8* const scales = x_run + M * run * 2 * kStepK;
  float* const partial = reinterpret_cast<float*>(
      shared + num_warps * (kRing * kStepBytes + (M + NORM) * run * 2 * kStepK));
  float* const squares = partial + 2 * num_warps * M * kPitch;

  // The step whose weights are loaded next runs ahead of the products. Rows beyond N repeat the
  // last one and are not stored.
  int load_tile = blockIdx.x / SPLIT, load_step = 0;
  const T* low_row = weight;
  int high_row = 0;  // from there
  const u32 queue = smem_address(own + lane * 16), queue_end = queue + kRing * kStepBytes;
  const auto find_rows = [&] {
    const int row = min(load_tile * kTileCols + group, N - 1);
    low_row = weight + static_cast<i64>(row) * K;
    high_row = (min(load_tile * kTileCols + group + 8, N - 1) - row) * K;
  };
  const auto load_weights = [&](u32 at) {
    if (load_step == 0 && load_tile < tiles) find_rows();
    const int k = first + load_step * kStepK + pair * 8;
    const bool valid = load_tile < tiles && k < K;
    const T* const from = low_row + (valid ? k : 0);
    COPY(at, from, valid);
    COPY(at + kStepBytes / 2, from + high_row, valid);
    cp_async_commit();
    if (++load_step == run) load_step = 0, load_tile += clusters;
  };
  const auto load_scales = [&] {
    for (int i = lane; i < 4 * run; i += kWarpSize) {
      const int k = first + 8 * i;
      cp_async_16(smem_address(scales + 16 * i), norm_weight + (k < K ? k : 0), k < K);
    }
  };

  if (NORM) load_scales();  // part of the first group
#pragma unroll 1
  for (u32 at = queue; at != queue_end; at += kStepBytes) load_weights(at);
  if (ahead_bytes > 0) prefetch_share(ahead, ahead_bytes);
  wait_for_previous();

#pragma unroll 1
  for (int row0 = 0; row0 < M; row0 += kXRows) {
    float sum_of[kXRows] = {};
#pragma unroll 1
    for (int i = lane; i < 4 * run; i += kWarpSize) {
      const int k = first + 8 * i;
      uint4 v[kXRows];
#pragma unroll
      for (int r = 0; r < kXRows; r++) {
        v[r] = load_16(x + min(row0 + r, M - 1) * x_stride + (k < K ? k : 0));
      }
      uint4 s = {};
      if (NORM) {
        cp_async_wait<kRing - 1>();  // a lane reads what it copied itself: no barrier
        s = *reinterpret_cast<const uint4*>(scales + 16 * i);
      }
#pragma unroll
      for (int r = 0; r < kXRows; r++) {
        if (row0 + r >= M) break;
        if (k >= K) v[r] = uint4{};
        if (NORM) {
          v[r] = {scaled<T>(v[r].x, s.x, sum_of[r]), scaled<T>(v[r].y, s.y, sum_of[r]),
                  scaled<T>(v[r].z, s.z, sum_of[r]), scaled<T>(v[r].w, s.w, sum_of[r])};
        }
        *reinterpret_cast<uint4*>(x_run + ((i / 4 * M + row0 + r) * 4 + i % 4) * 16) = v[r];
      }
    }
    if (NORM) {
#pragma unroll
      for (int r = 0; r < kXRows; r++) {
        const float sum = warp_sum(sum_of[r]);
        if (lane == 0 && row0 + r < M) squares[warp * M + row0 + r] = sum;
      }
    }
  }
  __syncwarp();
  if (ahead_bytes < 0) prefetch_share(ahead, -ahead_bytes);

  constexpr int kTiles = ROWS / 8;  // n8 fragments
  constexpr int kOutCols = SILU ? kTileCols / 2 : kTileCols;
  const int num_cols = SILU ? N / 2 : N;
  int buffer = 0;
  u32 at = queue;
#pragma unroll 1
  for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += clusters, buffer ^= 1) {
    const auto is_result = [&](int i) {
      return i < M * kOutCols && tile * kOutCols + i % kOutCols < num_cols;
    };
    // The residual of result number i, zero without one.
    const auto load_residual = [&](int i) {
      if (SILU || residual == nullptr || !is_result(i)) return 0.0f;
      const i64 row = i / kOutCols;
      return to_float(residual[row * residual_stride + tile * kOutCols + i % kOutCols]);
    };
    float add = load_residual(rank + threadIdx.x * SPLIT);  // on its way meanwhile

    float sum[kTiles][4] = {};
#pragma unroll 4
    for (int step = 0; step < run; step++) {
      cp_async_wait<kRing - 1>();
      const uint4 low = load_shared(at), high = load_shared(at + kStepBytes / 2);
      const u32 a0[4] = {low.x, high.x, low.y, high.y};
      const u32 a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int t = 0; t < kTiles; t++) {
        const int row = min(t * 8 + group, M - 1);  // rows beyond M repeat the last one
        const uint4 b = *reinterpret_cast<const uint4*>(x_run + ((step * M + row) * 4 + pair) * 16);
        mma_m16n8k16<T>(sum[t], a0, b.x, b.y);
        mma_m16n8k16<T>(sum[t], a1, b.z, b.w);
      }
      load_weights(at);
      at += kStepBytes;
      if (at == queue_end) at = queue;
    }

    float* const parts = partial + buffer * num_warps * M * kPitch;
    float* const part = parts + warp * M * kPitch;
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = t * 8 + pair * 2 + r;
        if (row < M) {
          part[row * kPitch + group] = sum[t][r];
          part[row * kPitch + group + 8] = sum[t][r + 2];
        }
      }
    }
    __syncthreads();

    // Columns of a result's sums: of the value, of its `up`, of the squares.
    constexpr int kSums = 1 + SILU + NORM, kSquares = kTileCols;
    const auto column = [](int j, int col) {
      return j == 0 ? col : SILU && j == 1 ? col + 8 : kSquares;
    };
    const auto sum_of_warps = [&](int row, int col) {
      const bool of_squares = NORM && col == kSquares;
      const float* const from = of_squares ? squares + row : parts + row * kPitch + col;
      const int stride = of_squares ? M : M * kPitch;
      float value = 0.0f;
#pragma unroll 4
      for (int w = 0; w < num_warps; w++) value += from[w * stride];
      return value;
    };
    if (SPLIT > 1) {
      constexpr int kCols = kTileCols + NORM;
#pragma unroll 1
      for (int i = threadIdx.x; i < M * kCols; i += blockDim.x) {
        block_sum[i / kCols][i % kCols] = sum_of_warps(i / kCols, i % kCols);
      }
      cluster_sync();
    }
#pragma unroll 1
    for (int i = rank + threadIdx.x * SPLIT; i < M * kOutCols; i += blockDim.x * SPLIT) {
      const int row = i / kOutCols;
      const int col = i % kOutCols;
      if (is_result(i)) {
        float v[kSums];
#pragma unroll
        for (int j = 0; j < kSums; j++) {
          v[j] = SPLIT > 1 ? sum_of_ranks<SPLIT>(&block_sum[row][column(j, col)])
                           : sum_of_warps(row, column(j, col));
        }
        if (NORM) {
          const float factor = rsqrtf(v[kSums - 1] / static_cast<float>(K) + eps);
          v[0] *= factor;
          if (SILU) v[1] *= factor;
        }
        if (bias != nullptr) {
          v[0] += to_float(bias[tile * kTileCols + col]);
          if (SILU) v[1] += to_float(bias[tile * kTileCols + col + 8]);
        }
        if (SILU) v[0] = silu(v[0]) * v[1];
        y[static_cast<i64>(row) * y_stride + tile * kOutCols + col] = from_float<Out>(v[0] + add);
      }
      add = load_residual(i + blockDim.x * SPLIT);
    }
    if (SPLIT > 1) cluster_sync();  // before block_sum changes, or the block ends
  }
}
