// y[i] = source[index[i]]: the embedding of token ids, and the rows of a batch that are sampled.
//
// source [*, K] and y [rows, K] contiguous, index [rows]; indices are in range (the engine checks
// token ids when a request arrives). One block per row, VEC elements an access.
// Bound: 2 rows K sizeof(T) bytes moved.
#include "common.cuh"

template <typename T, int VEC>
__global__ void __launch_bounds__(256)
    gather_rows_kernel(const T* source, const i32* index,
                       T* y, i32 K) {
  start_next();
  wait_for_previous();
  using Unit = Vec<T, VEC>;
  const i64 row = blockIdx.x;
  const Unit* from = reinterpret_cast<const Unit*>(source + static_cast<i64>(index[row]) * K);
  Unit* to = reinterpret_cast<Unit*>(y + row * K);
  for (int i = threadIdx.x; i < K / VEC; i += blockDim.x) to[i] = from[i];
}
