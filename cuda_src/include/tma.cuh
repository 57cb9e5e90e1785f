// Hopper's copies between global and shared memory by tensor map (TMA), and the barriers in shared
// memory that they report to (mbarrier). sm_90 and newer.
//
// A barrier completes a phase when its `count` arrivals and all announced bytes are there. Phases
// alternate between parity 0 and 1; wait(parity) returns once the phase of that parity is complete.
// A fresh barrier is in phase 0, so that waiting for parity 1 returns at once: the way to find all
// buffers empty at the start.
#pragma once

#include "common.cuh"

// driver/spec.py's TensorMap, encoded by the driver. A kernel takes it as
// `const __grid_constant__ TensorMap`, since the copies want its address.
struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After barrier_init by one thread and before a __syncthreads() or cluster_sync(): copies and other
// blocks of the cluster then see the initialised barriers.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// An arrival that also announces bytes to come.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// The address of what lies at this shared address in another block of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, int block) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}

// An arrival at the barrier of the same shared address in another block of the cluster. It orders
// reads before it (of a buffer that may now be filled again), but publishes no writes: releasing
// them to the cluster would make it wait for all of this thread's memory accesses.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, int block) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, block))
               : "memory");
}

// Stores to address_in() some block, and reports the 16 bytes to the barrier at address_in() it.
__device__ __forceinline__ void store_async(u32 to, float4 v, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same, where threads of other blocks wrote what is waited for.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Starts the copy of the box at (row, col) to the shared address `dst` (a multiple of 128 bytes, of
// 1 KiB with 128-byte swizzle), which reports its bytes to `barrier`: always those of a whole box.
__device__ __forceinline__ void tma_load(u32 dst, const TensorMap& map, int row, int col,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(&map), "r"(col), "r"(row), "r"(barrier)
      : "memory");
}

// For what a copy reads to leave L2 before anything else.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void tma_load(u32 dst, const TensorMap& map, int row, int col,
                                         u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(&map), "r"(col), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Both to the same shared address, and with the same barrier, of each block in `mask`.
__device__ __forceinline__ void tma_load_multicast(u32 dst, const TensorMap& map, int row, int col,
                                                   u32 barrier, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(&map), "r"(col), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(u32 dst, const TensorMap& map, int row, int col,
                                                   u32 barrier, u16 mask, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(dst),
      "l"(&map), "r"(col), "r"(row), "r"(barrier), "h"(mask), "l"(policy)
      : "memory");
}

// Starts the copy of a box from shared to global memory. Before it, what threads wrote there needs
// fence_async() (wgmma.cuh) by the writers and a barrier; after it, tma_store_commit() by the same
// thread.
__device__ __forceinline__ void tma_store(const TensorMap& map, int row, int col, u32 src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::
                   "l"(&map),
               "r"(col), "r"(row), "r"(src)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `Pending` of this thread's groups of stores are not yet in memory.
template <int Pending> __device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// Waits until at most `Pending` of them have not yet read shared memory.
template <int Pending> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
