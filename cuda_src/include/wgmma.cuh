// Hopper's tensor-core products of a warpgroup (128 threads), sm_90a only: wgmma.
//
// D 64 x N += A 64 x 16 (B N x 16)^T. A and B are tiles of shared memory whose rows are 64 elements
// of K (128 bytes), their 16-byte chunks permuted as by swizzled_chunk<8>; tiles start on 1 KiB.
// Lane (group, pair) of warp w holds D rows 16 w + group and + 8: d[4 j], d[4 j + 1] are columns
// 8 j + 2 pair and + 1 of the first row, d[4 j + 2], d[4 j + 3] of the second.
#pragma once

#include "mma.cuh"

// The descriptor of a tile at this shared address: groups of 8 rows are 1 KiB apart, 128-byte
// permutation. All lanes have the same address; taken from lane 0, descriptors stay in uniform
// registers, where a product wants them, instead of being copied there, and so do those further on.
__device__ __forceinline__ u64 wgmma_tile(u32 address) {
  const u32 low = __shfl_sync(kFullMask, address / 16, 0);
  return static_cast<u64>(low) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// What is this many bytes further; 32 are 16 elements of K.
__device__ __forceinline__ u64 wgmma_further(u64 tile, u32 bytes) {
  return tile + bytes / 16;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `Pending` committed groups of products are unfinished.
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// After the wait for the last products: what uses d stays behind it. Only what has a place of its own
// in the order of things, as stores have, does so anyway.
template <int N> __device__ __forceinline__ void wgmma_done(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// What this thread wrote to shared memory (cp.async included, once waited for) is seen by products
// and copies by tensor map that are started after a barrier that follows.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Gives registers of a warpgroup that needs few to those that need many. All of its warps call it.
template <int Registers> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// d += a b^T for tiles by their descriptors. Between a wgmma_fence() and the wgmma_wait() for its
// group, d must not be touched.
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 a, u64 b);

// The instruction wants each of its N / 2 registers spelled out.
#define PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES_16 PLACES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_32 \
  PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_48 \
  PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES_64 \
  PLACES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_96 \
  PLACES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
            ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PLACES_128 \
  PLACES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106" \
            ", %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117" \
            ", %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define D_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_8(i) D_4(i), D_4(i + 4)
#define D_16(i) D_8(i), D_8(i + 8)
#define D_32(i) D_16(i), D_16(i + 16)
#define D_48(i) D_32(i), D_16(i + 32)
#define D_64(i) D_32(i), D_32(i + 32)
#define D_96(i) D_64(i), D_32(i + 64)
#define D_128(i) D_64(i), D_64(i + 64)

#define DEFINE_WGMMA(T, NAME, N, COUNT, A, B) \
  template <> __device__ __forceinline__ void wgmma<T, N>(float (&d)[N / 2], u64 a, u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                 " {" PLACES_##COUNT "}, " A ", " B ", 1, 1, 1, 0, 0;" \
                 : D_##COUNT(0) \
                 : "l"(a), "l"(b)); \
  }
#define DEFINE_WGMMA_OF(T, NAME) \
  DEFINE_WGMMA(T, NAME, 16, 8, "%8", "%9") \
  DEFINE_WGMMA(T, NAME, 32, 16, "%16", "%17") \
  DEFINE_WGMMA(T, NAME, 64, 32, "%32", "%33") \
  DEFINE_WGMMA(T, NAME, 96, 48, "%48", "%49") \
  DEFINE_WGMMA(T, NAME, 128, 64, "%64", "%65") \
  DEFINE_WGMMA(T, NAME, 192, 96, "%96", "%97") \
  DEFINE_WGMMA(T, NAME, 256, 128, "%128", "%129")

DEFINE_WGMMA_OF(__nv_bfloat16, "bf16")
DEFINE_WGMMA_OF(__half, "f16")
