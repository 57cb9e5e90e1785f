// y = x * rsqrt(mean(x^2) + eps) * weight, and the same for x + residual, which is kept as `sum`.
//
// All [T, K] contiguous, weight [K]. float32 throughout, rounded once to T; the sum is normalised
// as it was rounded, so that later layers, which read it, see the same values.
//
// Work: one block per row, ITERS vectors of VEC elements a thread, which stay in registers between
// the mean and the product: each input is read once. Threads and ITERS follow from K alone, and
// with them the order of the sum.
// Bound: 2 T K sizeof(T) bytes moved, 4 T K sizeof(T) with the residual. At few rows latency
// counts: the weights' loads are issued with those of x, not after the reduction.
#include "reduce.cuh"

// Normalises the block's row. `row` holds the thread's vectors, zeros beyond the row's end.
template <typename T, int VEC, int ITERS>
__device__ __forceinline__ void normalise(const Vec<T, VEC> (&row)[ITERS],
                                          const Vec<T, VEC> (&weight)[ITERS], Vec<T, VEC>* y, i32 K,
                                          float eps) {
  __shared__ float scratch[kMaxWarps];
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < ITERS; ++n) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float value = to_float(row[n].v[j]);
      squares = fmaf(value, value, squares);
    }
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / static_cast<float>(K) + eps);
#pragma unroll
  for (int n = 0; n < ITERS; ++n) {
    const int i = n * blockDim.x + threadIdx.x;
    if (i >= K / VEC) return;
    Vec<T, VEC> out;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      out.v[j] = from_float<T>(to_float(row[n].v[j]) * scale * to_float(weight[n].v[j]));
    }
    y[i] = out;
  }
}

template <typename T, int VEC, int ITERS>
__global__ void __launch_bounds__(1024)
    rms_norm_kernel(const T* x, const T* __restrict__ weight, T* y,
                    i32 K, float eps) {
  start_next();
  wait_for_previous();
  using Unit = Vec<T, VEC>;
  const i64 offset = static_cast<i64>(blockIdx.x) * K;
  Unit row[ITERS] = {}, scale[ITERS] = {};
#pragma unroll
  for (int n = 0; n < ITERS; ++n) {
    const int i = n * blockDim.x + threadIdx.x;
    if (i < K / VEC) {
      row[n] = reinterpret_cast<const Unit*>(x + offset)[i];
      scale[n] = reinterpret_cast<const Unit*>(weight)[i];
    }
  }
  normalise<T, VEC, ITERS>(row, scale, reinterpret_cast<Unit*>(y + offset), K, eps);
}

template <typename T, int VEC, int ITERS>
__global__ void __launch_bounds__(1024)
    add_rms_norm_kernel(const T* x, const T* residual,
                        const T* __restrict__ weight, T* sum, T* y,
                        i32 K, float eps) {
  start_next();
  wait_for_previous();
  using Unit = Vec<T, VEC>;
  const i64 offset = static_cast<i64>(blockIdx.x) * K;
  Unit row[ITERS] = {}, scale[ITERS] = {};
#pragma unroll
  for (int n = 0; n < ITERS; ++n) {
    const int i = n * blockDim.x + threadIdx.x;
    if (i < K / VEC) {
      const Unit a = reinterpret_cast<const Unit*>(x + offset)[i];
      const Unit b = reinterpret_cast<const Unit*>(residual + offset)[i];
      scale[n] = reinterpret_cast<const Unit*>(weight)[i];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        row[n].v[j] = from_float<T>(to_float(a.v[j]) + to_float(b.v[j]));
      }
      reinterpret_cast<Unit*>(sum + offset)[i] = row[n];
    }
  }
  normalise<T, VEC, ITERS>(row, scale, reinterpret_cast<Unit*>(y + offset), K, eps);
}
