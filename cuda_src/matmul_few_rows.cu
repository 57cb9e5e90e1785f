// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, for one or two rows of x (decode). With
// NORM, x stands for its RMSNorm: y = rsqrt(mean(x^2) + eps) (x * norm_weight) weight^T ...
//
// x [M, K] with row stride, M <= kMaxRows, weight [N, K] contiguous, bias [N], norm_weight [K],
// residual and y [M, N] with row strides; absent operands are null. K is a multiple of 8, rows of x
// and weight start on 16 bytes. Silu: weight rows are interleaved by 8 (8 gate rows, their 8 up
// rows, ...), y is [M, N / 2].
//
// Bound: the weights are read from memory exactly once, 2 N K bytes. A block owns 16 weight rows;
// its warps split K into equal runs of 32-element steps, so that a block reads one contiguous
// piece of memory with 1 KiB x RING x WARPS in flight. The product is computed transposed, weight
// rows as the 16 rows of mma.m16n8k16 and rows of x as its columns. A sum does not care how k is
// numbered: each lane takes the 8 neighbouring elements of one 16-byte load for two k16 products,
// of weight and x alike, so nothing is shuffled or converted. Shared memory serves each lane as a
// queue of its own cp.async loads (registers would do, but compilers do not keep such loads in
// flight). x waits in shared memory as well: all of it is on its way at once. Columns beyond M cost
// nothing but idle tensor cores.
//
// The norm delays no weight: each lane squares the elements of x that it brings, and the root of
// the mean is applied to the sums. x * norm_weight is rounded once, as the normed x would be.
//
// Partial sums of the warps are added in order of k through shared memory: the order of the whole
// sum depends on K and WARPS alone, not on M.
#include "activation.cuh"
#include "mma.cuh"

constexpr int kMaxRows = 2;
constexpr int kTileCols = 16;  // weight rows (columns of y) of a block
constexpr int kStepK = 32;  // elements of K that four lanes cover with one 16-byte load each
constexpr int kStepBytes = 2 * 16 * kWarpSize;  // of weights
constexpr int kRingsPerSm = 192;  // KiB that the queues of an SM may have

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

template <typename T, typename Out, int WARPS, int RING, bool SILU, bool NORM>
__global__ void __launch_bounds__(WARPS* kWarpSize, kRingsPerSm / (WARPS * RING))
    matmul_few_rows_kernel(const T* x, const T* __restrict__ weight, const T* __restrict__ bias,
                           const T* __restrict__ norm_weight, const T* residual, Out* y, int M,
                           int N, int K, int x_stride, int residual_stride, int y_stride,
                           float eps) {
  start_next();
  // Of each warp: its queue [RING][2][lane] of 16 bytes, its run of x [step][M][4] and, for a norm,
  // of norm_weight [step][4].
  extern __shared__ __align__(128) u8 shared[];
  __shared__ float partial[WARPS][kMaxRows][kTileCols];
  __shared__ float squares[WARPS][kMaxRows];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int group = lane / 4;
  const int pair = lane % 4;
  const int col0 = blockIdx.x * kTileCols;
  const int run = ceil_div(ceil_div(K, kStepK), WARPS);  // steps of a warp
  const int first = warp * run * kStepK;

  constexpr int kQueueBytes = RING * kStepBytes, kStepXBytes = 2 * kStepK;
  u8* const own = shared + warp * (kQueueBytes + (M + NORM) * run * kStepXBytes);
  u8* const x_run = own + kQueueBytes;
  u8* const scales = x_run + M * run * kStepXBytes;

  // Rows beyond N repeat the last one and are not stored.
  const int low = min(col0 + group, N - 1);
  const T* const low_row = weight + static_cast<i64>(low) * K;
  const int high_row = (min(col0 + group + 8, N - 1) - low) * K;  // from there
  const u32 queue = smem_address(own + lane * 16), queue_end = queue + kQueueBytes;
  int loads = 0;  // steps
  const auto load_weights = [&](u32 at) {
    if (loads < run) {
      const int k = first + loads * kStepK + pair * 8;
      const T* const from = low_row + (k < K ? k : 0);
      cp_async_16(at, from, k < K);
      cp_async_16(at + kStepBytes / 2, from + high_row, k < K);
      loads++;
    }
    cp_async_commit();  // possibly empty, so that "all but RING - 1" always means the next step
  };

  // The norm's weight is part of the first group.
  for (int i = lane; NORM && i < 4 * run; i += kWarpSize) {
    const int k = first + 8 * i;
    cp_async_16(smem_address(scales + 16 * i), norm_weight + (k < K ? k : 0), k < K);
  }
#pragma unroll 1
  for (u32 at = queue; at != queue_end; at += kStepBytes) load_weights(at);
  wait_for_previous();

  float sum_of[kMaxRows] = {};
#pragma unroll 1
  for (int i = lane; i < 4 * run; i += kWarpSize) {
    const int k = first + 8 * i;
    uint4 v[kMaxRows];
#pragma unroll
    for (int r = 0; r < kMaxRows; r++) {
      v[r] = load_16(x + min(r, M - 1) * x_stride + (k < K ? k : 0));
    }
    uint4 s = {};
    if (NORM) {
      cp_async_wait<RING - 1>();  // a lane reads what it copied itself: no barrier
      s = *reinterpret_cast<const uint4*>(scales + 16 * i);
    }
#pragma unroll
    for (int r = 0; r < kMaxRows; r++) {
      if (k >= K) v[r] = uint4{};
      if (NORM) {
        v[r] = {scaled<T>(v[r].x, s.x, sum_of[r]), scaled<T>(v[r].y, s.y, sum_of[r]),
                scaled<T>(v[r].z, s.z, sum_of[r]), scaled<T>(v[r].w, s.w, sum_of[r])};
      }
      if (r < M) *reinterpret_cast<uint4*>(x_run + ((i / 4 * M + r) * 4 + i % 4) * 16) = v[r];
    }
  }
  if (NORM) {
#pragma unroll
    for (int r = 0; r < kMaxRows; r++) {
      const float sum = warp_sum(sum_of[r]);
      if (lane == 0) squares[warp][r] = sum;
    }
  }
  __syncwarp();

  // This thread's result, if there is one, and its residual, on its way meanwhile.
  constexpr int kOutCols = SILU ? kTileCols / 2 : kTileCols;
  static_assert(kMaxRows * kTileCols <= kWarpSize, "a thread for each result");
  const int row = threadIdx.x / kOutCols, col = threadIdx.x % kOutCols;
  const int out_col = blockIdx.x * kOutCols + col;
  const bool has_result = row < M && out_col < (SILU ? N / 2 : N);
  float add = 0.0f;
  if (!SILU && has_result && residual != nullptr) {
    add = to_float(residual[static_cast<i64>(row) * residual_stride + out_col]);
  }

  float sum[4] = {};
  const u8* x_step = x_run + (min(group, M - 1) * 4 + pair) * 16;  // columns beyond M repeat a row
  u32 at = queue;
#pragma unroll 4
  for (int step = 0; step < run; step++) {
    cp_async_wait<RING - 1>();
    const uint4 low = load_shared(at), high = load_shared(at + kStepBytes / 2);
    const uint4 b = *reinterpret_cast<const uint4*>(x_step + step * M * kStepXBytes);
    const u32 a0[4] = {low.x, high.x, low.y, high.y};
    const u32 a1[4] = {low.z, high.z, low.w, high.w};
    mma_m16n8k16<T>(sum, a0, b.x, b.y);
    mma_m16n8k16<T>(sum, a1, b.z, b.w);
    load_weights(at);
    at += kStepBytes;
    if (at == queue_end) at = queue;
  }

  if (pair == 0) {
#pragma unroll
    for (int r = 0; r < kMaxRows; r++) {
      partial[warp][r][group] = sum[r];
      partial[warp][r][group + 8] = sum[r + 2];
    }
  }
  __syncthreads();
  if (!has_result) return;

  float value = 0.0f, up = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    value += partial[w][row][col];
    if (SILU) up += partial[w][row][col + 8];
  }
  if (NORM) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += squares[w][row];
    const float factor = rsqrtf(sum / static_cast<float>(K) + eps);
    value *= factor;
    up *= factor;
  }
  if (bias != nullptr) {
    value += to_float(bias[col0 + col]);
    if (SILU) up += to_float(bias[col0 + col + 8]);
  }
  if (SILU) value = silu(value) * up;
  y[static_cast<i64>(row) * y_stride + out_col] = from_float<Out>(value + add);
}
