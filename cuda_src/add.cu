// y = a + b, summed in float32 and rounded once. All contiguous, `count` elements of T.
//
// Work: a thread adds one vector of VEC elements. Bound: 3 count sizeof(T) bytes moved.
#include "common.cuh"

template <typename T, int VEC>
__global__ void __launch_bounds__(256)
    add_kernel(const T* a, const T* b, T* y, i64 count) {
  start_next();
  wait_for_previous();
  using Unit = Vec<T, VEC>;
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count / VEC) return;
  const Unit u = reinterpret_cast<const Unit*>(a)[i], v = reinterpret_cast<const Unit*>(b)[i];
  Unit sum;
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum.v[j] = from_float<T>(to_float(u.v[j]) + to_float(v.v[j]));
  reinterpret_cast<Unit*>(y)[i] = sum;
}
