// Blocks of a cluster (sm_90 and newer) that read each other's shared memory.
#pragma once

#include "common.cuh"

constexpr int kMaxCluster = 8;  // blocks in a cluster that every such GPU can launch

// Waits for all threads of the cluster; what they wrote to shared memory before is then seen.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The two halves of a meeting of all threads of the cluster that publishes no writes: for what is
// done with shared memory, and for barriers after fence_barrier_init().
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Two floats at a shared address of the block of this rank in the cluster; zeros unless `valid`.
__device__ __forceinline__ float2 load_from_rank(u32 address, int rank, bool valid) {
  float2 v = {0.0f, 0.0f};
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p;\n"
      ".reg .u32 remote;\n"
      "setp.ne.s32 p, %4, 0;\n"
      "@p mapa.shared::cluster.u32 remote, %2, %3;\n"
      "@p ld.shared::cluster.v2.f32 {%0, %1}, [remote]; }"
      : "+f"(v.x), "+f"(v.y)
      : "r"(address), "r"(rank), "r"(static_cast<int>(valid))
      : "memory");
#endif
  return v;
}

// Where the block of this rank in the cluster has what this block has at `shared`.
template <typename T> __device__ __forceinline__ T* at_rank(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  u64 remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(remote);
#else
  return shared;
#endif
}
