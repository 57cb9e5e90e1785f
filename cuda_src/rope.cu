// Rotary position embedding, and writing keys and values into the paged cache.
//   y[i]       = x[i] cos(a_i) - x[i + F] sin(a_i)      a_i = position * inv_freq[i]
//   y[i + F]   = x[i + F] cos(a_i) + x[i] sin(a_i)      i = 0 .. F - 1, F = head_dim / 2
//
// Inputs [tokens, heads * head_dim] with a row stride; the cache as in paged_kv.cuh; the angle as
// in rotation.cuh.
//
// One block per token. A thread owns kPairs neighbouring pairs i, takes their sines once and goes
// through the heads with them: F / kPairs threads a head, as many heads at once as the block has
// threads for. Values in and out are 8-byte accesses.
//
// Bytes: each value in and out once. Bound: memory (for few tokens: latency).
#include "common.cuh"
#include "paged_kv.cuh"
#include "rotation.cuh"

constexpr int kMaxThreads = 256;
constexpr int kPairs = 4;  // as in tinyvllm/ops/rope.py

// This thread's pairs, and the heads that it goes through: head, head + head_step, ...
struct Place {
  int pair;  // first of its kPairs pairs
  int head;
  int head_step;

  __device__ __forceinline__ explicit Place(int half_dim) {
    const int lanes = half_dim / kPairs;
    pair = threadIdx.x % lanes * kPairs;
    head_step = blockDim.x / lanes;
    // Threads that don't make a whole head have nothing to do.
    const int in_block = threadIdx.x / lanes;
    head = in_block < head_step ? in_block : 1 << 30;
  }
};

struct Rotation {
  SinCos of[kPairs];
};

__device__ __forceinline__ Rotation rotation(int position, const float* inv_freq) {
  const Vec<float, kPairs> freq = *reinterpret_cast<const Vec<float, kPairs>*>(inv_freq);
  Rotation r;
#pragma unroll
  for (int i = 0; i < kPairs; i++) r.of[i] = rope_angle(position, freq.v[i]);
  return r;
}

// The two halves of kPairs pairs of a head.
template <typename T> struct Pairs {
  Vec<T, kPairs> low, high;

  __device__ __forceinline__ static Pairs load(const T* p, int half_dim) {
    return {*reinterpret_cast<const Vec<T, kPairs>*>(p),
            *reinterpret_cast<const Vec<T, kPairs>*>(p + half_dim)};
  }

  __device__ __forceinline__ void store(T* p, int half_dim) const {
    *reinterpret_cast<Vec<T, kPairs>*>(p) = low;
    *reinterpret_cast<Vec<T, kPairs>*>(p + half_dim) = high;
  }

  __device__ __forceinline__ Pairs rotated(const Rotation& r) const {
    Pairs y;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const float2 turned = rotate_pair(to_float(low.v[i]), to_float(high.v[i]), r.of[i]);
      y.low.v[i] = from_float<T>(turned.x);
      y.high.v[i] = from_float<T>(turned.y);
    }
    return y;
  }
};

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    rope_kernel(const T* x, const i32* positions,
                const float* __restrict__ inv_freq, T* y, int x_stride, int y_stride,
                int num_heads, int half_dim) {
  start_next();
  wait_for_previous();
  const i64 token = blockIdx.x;
  const Place place(half_dim);
  const Rotation r = rotation(positions[token], inv_freq + place.pair);
#pragma unroll 4
  for (int h = place.head; h < num_heads; h += place.head_step) {
    const int column = h * 2 * half_dim + place.pair;
    Pairs<T>::load(x + token * x_stride + column, half_dim)
        .rotated(r)
        .store(y + token * y_stride + column, half_dim);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    kv_write_kernel(const T* k, const T* v,
                    const i32* positions, const i32* token_slots,
                    const i32* block_tables, T* kv_cache, int k_stride,
                    int v_stride, i64 block_stride, int num_kv_heads, int half_dim,
                    int block_shift, int max_blocks) {
  start_next();
  wait_for_previous();
  const i64 token = blockIdx.x;
  const int slot = token_slots[token];
  if (slot < 0) return;  // padding
  const Place place(half_dim);
  const PagedKv<T> kv(kv_cache, block_stride, num_kv_heads, 0, block_tables, max_blocks, slot,
                      block_shift, 2 * half_dim);
  T* key = kv.key(positions[token]) + place.pair;  // of head 0
  const i64 head_stride = static_cast<i64>(2 * half_dim) << block_shift;
#pragma unroll 4
  for (int h = place.head; h < num_kv_heads; h += place.head_step) {
    const int column = h * 2 * half_dim + place.pair;
    T* target = key + h * head_stride;
    Pairs<T>::load(k + token * k_stride + column, half_dim).store(target, half_dim);
    Pairs<T>::load(v + token * v_stride + column, half_dim).store(target + kv.v_offset, half_dim);
  }
}

// Both at once: qkv holds the heads of q, k and v in this order; q is rotated into `q`, k rotated
// and v as it is go to the cache. Of a padding token only q is written.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    rope_kv_write_kernel(const T* qkv, const i32* positions,
                         const i32* token_slots, const i32* block_tables,
                         const float* __restrict__ inv_freq, T* q,
                         T* kv_cache, int qkv_stride, int q_stride, i64 block_stride,
                         int num_heads, int num_kv_heads, int half_dim, int block_shift,
                         int max_blocks) {
  start_next();
  wait_for_previous();
  const i64 token = blockIdx.x;
  const int position = positions[token], slot = token_slots[token];
  const Place place(half_dim);
  const Rotation r = rotation(position, inv_freq + place.pair);
  const PagedKv<T> kv(kv_cache, block_stride, num_kv_heads, 0, block_tables, max_blocks, slot,
                      block_shift, 2 * half_dim);
  T* key = slot < 0 ? nullptr : kv.key(position) + place.pair;
  // In the cache the V heads follow the K heads, as in qkv: together they are 2 num_kv_heads.
  const i64 head_stride = static_cast<i64>(2 * half_dim) << block_shift;
  const int total_heads = num_heads + (slot < 0 ? 0 : 2 * num_kv_heads);
#pragma unroll 4
  for (int h = place.head; h < total_heads; h += place.head_step) {
    const int column = h * 2 * half_dim + place.pair;
    const Pairs<T> pairs = Pairs<T>::load(qkv + token * qkv_stride + column, half_dim);
    T* target = h < num_heads ? q + token * q_stride + column : key + (h - num_heads) * head_stride;
    const bool is_value = h >= num_heads + num_kv_heads;
    (is_value ? pairs : pairs.rotated(r)).store(target, half_dim);
  }
}
