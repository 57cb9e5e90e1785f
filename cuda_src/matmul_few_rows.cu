// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, for few rows of x (decode).
//
// x [M, K] with row stride, weight [N, K] contiguous, bias [N], residual and y [M, N] with row
// strides; absent operands are null. K is a multiple of 8, rows of x and weight start on 16 bytes.
// Silu: weight rows are interleaved by 8 (8 gate rows, their 8 up rows, ...), y is [M, N / 2].
//
// Bound: the weights are read from memory exactly once, 2 N K bytes. A block owns 16 weight rows;
// its warps split K into equal runs of 32-element steps, so that a block reads one contiguous
// piece of memory with 1 KiB x kRing x warps in flight. The product is computed transposed, weight
// rows as the 16 rows of mma.m16n8k16 and rows of x as its columns. A sum does not care how k is
// numbered: each lane takes the 8 neighbouring elements of one 16-byte load for two k16 products,
// of weight and x alike, so nothing is shuffled or converted. Shared memory serves each lane as a
// queue of its own cp.async loads (registers would do, but compilers do not keep such loads in
// flight). Columns beyond M cost nothing but idle tensor cores.
//
// Partial sums of the warps are added in order of k through shared memory: the order of the whole
// sum depends on K alone, not on M or ROWS.
#include "activation.cuh"
#include "mma.cuh"

constexpr int kTileCols = 16;  // weight rows (columns of y) of a block
constexpr int kMaxWarps = 16;
constexpr int kStepK = 32;  // elements of K that four lanes cover with one 16-byte load each
constexpr int kRing = 4;  // steps whose weights a warp has in flight
constexpr int kStepBytes = 2 * 16 * kWarpSize;  // of weights
constexpr int kPitch = 20;  // of a row of partial sums: the lanes of a fragment hit all banks once

// Volatile, so that it stays ahead of the waits for weights that follow it.
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <typename T, typename Out, int ROWS, bool SILU>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, ROWS == 8 ? 2 : 1)
    matmul_few_rows_kernel(const T* x, const T* __restrict__ weight,
                           const T* __restrict__ bias, const T* residual, Out* y, int M, int N,
                           int K, int x_stride, int residual_stride, int y_stride) {
  start_next();
  constexpr int kTiles = ROWS / 8;  // n8 fragments
  extern __shared__ __align__(128) u8 queues[];  // [warp][kRing][2][lane] of 16 bytes
  __shared__ float partial[kMaxWarps][ROWS][kPitch];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  const int group = lane / 4;
  const int pair = lane % 4;
  const int col0 = blockIdx.x * kTileCols;

  const int steps = ceil_div(K, kStepK);
  const int steps_per_warp = ceil_div(steps, num_warps);
  const int first = warp * steps_per_warp;
  const int last = min(first + steps_per_warp, steps);

  // Rows beyond N or M repeat the last one and are not stored.
  const T* const low_row = weight + static_cast<i64>(min(col0 + group, N - 1)) * K;
  const int high_row = (min(col0 + group + 8, N - 1) - min(col0 + group, N - 1)) * K;  // from there
  int x_row[kTiles];  // its first element; an int, as registers are short
#pragma unroll
  for (int t = 0; t < kTiles; t++) x_row[t] = min(t * 8 + group, M - 1) * x_stride;
  const auto column = [&](int step) { return step * kStepK + pair * 8; };
  const auto is_valid = [&](int step) { return step < last && column(step) < K; };

  u8* const queue = queues + warp * kRing * kStepBytes + lane * 16;
  const auto load_weights = [&](int step, int slot) {
    const bool valid = is_valid(step);
    const int k = valid ? column(step) : 0;
    const u32 dst = smem_address(queue + slot * kStepBytes);
    cp_async_16(dst, low_row + k, valid);
    cp_async_16(dst + kStepBytes / 2, low_row + high_row + k, valid);
    cp_async_commit();
  };

  float sum[kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kRing; i++) load_weights(first + i, i);
  wait_for_previous();

  constexpr int kOutCols = SILU ? kTileCols / 2 : kTileCols;
  const int num_cols = SILU ? N / 2 : N;
  const auto is_result = [&](int i) {
    return i < M * kOutCols && blockIdx.x * kOutCols + i % kOutCols < num_cols;
  };
  // The residual of this thread's result number i, zero without one.
  const auto load_residual = [&](int i) {
    if (SILU || residual == nullptr || !is_result(i)) return 0.0f;
    const i64 row = i / kOutCols;
    return to_float(residual[row * residual_stride + blockIdx.x * kOutCols + i % kOutCols]);
  };
  float add = load_residual(threadIdx.x);  // on its way together with x
  for (int step = first; step < last; step += kRing) {
    uint4 x_part[kRing][kTiles];
#pragma unroll
    for (int i = 0; i < kRing; i++) {
      const int k = is_valid(step + i) ? column(step + i) : 0;
#pragma unroll
      for (int t = 0; t < kTiles; t++) x_part[i][t] = load_16(x + x_row[t] + k);
    }
#pragma unroll
    for (int i = 0; i < kRing; i++) {
      cp_async_wait<kRing - 1>();  // a lane reads only what it copied itself: no barrier
      const uint4 low = *reinterpret_cast<const uint4*>(queue + i * kStepBytes);
      const uint4 high =
          *reinterpret_cast<const uint4*>(queue + i * kStepBytes + kStepBytes / 2);
      const u32 a0[4] = {low.x, high.x, low.y, high.y};
      const u32 a1[4] = {low.z, high.z, low.w, high.w};
      const bool valid = is_valid(step + i);
#pragma unroll
      for (int t = 0; t < kTiles; t++) {
        const uint4 b = valid ? x_part[i][t] : uint4{};
        mma_m16n8k16<T>(sum[t], a0, b.x, b.y);
        mma_m16n8k16<T>(sum[t], a1, b.z, b.w);
      }
      load_weights(step + kRing + i, i);
    }
  }

#pragma unroll
  for (int t = 0; t < kTiles; t++) {
    const int row = t * 8 + pair * 2;
    partial[warp][row][group] = sum[t][0];
    partial[warp][row + 1][group] = sum[t][1];
    partial[warp][row][group + 8] = sum[t][2];
    partial[warp][row + 1][group + 8] = sum[t][3];
  }
  __syncthreads();

  const auto total = [&](int row, int col) {
    float value = 0.0f;
    for (int w = 0; w < num_warps; w++) value += partial[w][row][col];
    return bias != nullptr ? value + to_float(bias[col0 + col]) : value;
  };
  for (int i = threadIdx.x; i < M * kOutCols; i += blockDim.x) {
    const int row = i / kOutCols;
    const int col = i % kOutCols;
    if (is_result(i)) {
      float value = total(row, col);
      if constexpr (SILU) value = silu(value) * total(row, col + 8);
      y[static_cast<i64>(row) * y_stride + blockIdx.x * kOutCols + col] =
          from_float<Out>(value + add);
    }
    add = load_residual(i + blockDim.x);
  }
}
