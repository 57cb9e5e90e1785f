// Dummy weights: dst[row(r), c] = round(base + int16(hash(r * row_len + c, key) >> 16) * scale)
//
// dst: rows of `pitch` elements of T, the first `row_len` of which are written. Logical row r goes
// to row (r / group) * group * num_parts + r % group: `group` rows of this tensor alternate with
// those of num_parts - 1 others (num_parts 1: contiguous).
// A value depends only on its logical index and the key, so it is the same in every layout, and
// ops/random_fill.py makes the same bits: the product and the sum are rounded separately.
//
// Work: a thread writes kUnroll vectors of VEC elements, neighbouring threads neighbouring vectors.
// Bound: sizeof(T) bytes a value written, at the speed of device memory.
#include "common.cuh"
#include "hash.cuh"

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

template <typename T, int VEC>
__global__ void __launch_bounds__(kThreads)
    random_fill_kernel(T* dst, u32 key, float base, float scale, u32 num_vectors, u32 row_vectors,
                       i64 pitch, u32 group, u32 num_parts) {
  const u64 first = static_cast<u64>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const u64 wide = first + u * kThreads;
    if (wide >= num_vectors) return;
    const u32 vector = static_cast<u32>(wide);
    const u32 row = vector / row_vectors;
    const u64 column = static_cast<u64>(vector - row * row_vectors) * VEC;
    const u64 dst_row = row + static_cast<u64>(row / group) * group * (num_parts - 1);
    Vec<T, VEC> out;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      // Rows hold whole vectors, so the logical index follows from the vector's number alone.
      const u32 h = hash_index(wide * VEC + i, key);
      const float value = static_cast<float>(static_cast<i32>(h) >> 16);
      out.v[i] = from_float<T>(__fadd_rn(base, __fmul_rn(value, scale)));
    }
    *reinterpret_cast<Vec<T, VEC>*>(dst + dst_row * pitch + column) = out;
  }
}
