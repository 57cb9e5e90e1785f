// kv_cache[dst] = kv_cache[src] for each (src, dst) of block_copies [num_copies, 2].
//
// A block of the cache is one contiguous piece of block_vectors 16-byte vectors over all layers
// (paged_kv.cuh). No dst is another copy's src or dst. Block (x, c): kVectors vectors of copy c, a
// warp's accesses side by side, a thread's kUnroll loads all out before the first store.
//
// Bytes: each copied block read and written once. Bound: memory.
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kVectors = kThreads * kUnroll;  // as in tinyvllm/ops/copy_blocks.py

__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const i32* block_copies, uint4* kv_cache, i64 block_vectors) {
  start_next();
  wait_for_previous();
  const uint4* src = kv_cache + block_copies[2 * blockIdx.y] * block_vectors;
  uint4* dst = kv_cache + block_copies[2 * blockIdx.y + 1] * block_vectors;
  const i64 first = static_cast<i64>(blockIdx.x) * kVectors + threadIdx.x;
  uint4 held[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; i++) {
    if (first + i * kThreads < block_vectors) held[i] = src[first + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kUnroll; i++) {
    if (first + i * kThreads < block_vectors) dst[first + i * kThreads] = held[i];
  }
}
