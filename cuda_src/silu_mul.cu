// y = silu(gate) * up with silu(x) = x / (1 + exp(-x)), in float32 and rounded once.
//
// gate, up [T, I] may be column views: their rows lie gate_stride and up_stride elements apart;
// y [T, I] is contiguous. Work: blockIdx.x is the row (x is the grid's one long axis), a thread
// has one vector of VEC columns. Bound: 3 T I sizeof(T) bytes moved.
#include "activation.cuh"
#include "common.cuh"

template <typename T, int VEC>
__global__ void __launch_bounds__(256)
    silu_mul_kernel(const T* gate, const T* up, T* y, i32 I,
                    i32 gate_stride, i32 up_stride) {
  start_next();
  wait_for_previous();
  using Unit = Vec<T, VEC>;
  const i64 row = blockIdx.x;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VEC;
  if (column >= I) return;
  const Unit g = *reinterpret_cast<const Unit*>(gate + row * gate_stride + column);
  const Unit u = *reinterpret_cast<const Unit*>(up + row * up_stride + column);
  Unit out;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    out.v[j] = from_float<T>(silu(to_float(g.v[j])) * to_float(u.v[j]));
  }
  *reinterpret_cast<Unit*>(y + row * I + column) = out;
}
