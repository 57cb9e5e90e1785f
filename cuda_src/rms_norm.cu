// y = x * rsqrt(mean(x^2) + eps) * weight. All [T, K] contiguous, weight [K]; float32 throughout,
// rounded once to T.
//
// Work: one block per row, ITERS vectors of VEC elements a thread, which stay in registers between
// the mean and the product: x is read once. Threads and ITERS follow from K alone, and with them
// the order of the sum.
// Bound: 2 T K sizeof(T) bytes moved. At few rows latency counts: the weights' loads are issued
// before x is there.
#include "reduce.cuh"

template <typename T, int VEC, int ITERS>
__global__ void __launch_bounds__(1024)
    rms_norm_kernel(const T* x, const T* __restrict__ weight, T* y, i32 K, float eps) {
  start_next();
  using Unit = Vec<T, VEC>;
  __shared__ float scratch[kMaxWarps];
  const i64 offset = static_cast<i64>(blockIdx.x) * K;
  Unit row[ITERS] = {}, scale[ITERS] = {};
#pragma unroll
  for (int n = 0; n < ITERS; ++n) {
    const int i = n * blockDim.x + threadIdx.x;
    if (i < K / VEC) scale[n] = reinterpret_cast<const Unit*>(weight)[i];
  }
  wait_for_previous();
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < ITERS; ++n) {
    const int i = n * blockDim.x + threadIdx.x;
    if (i < K / VEC) row[n] = reinterpret_cast<const Unit*>(x + offset)[i];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float value = to_float(row[n].v[j]);
      squares = fmaf(value, value, squares);
    }
  }
  const float factor = rsqrtf(block_sum(squares, scratch) / static_cast<float>(K) + eps);
#pragma unroll
  for (int n = 0; n < ITERS; ++n) {
    const int i = n * blockDim.x + threadIdx.x;
    if (i >= K / VEC) return;
    Unit out;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      out.v[j] = from_float<T>(to_float(row[n].v[j]) * factor * to_float(scale[n].v[j]));
    }
    reinterpret_cast<Unit*>(y + offset)[i] = out;
  }
}
