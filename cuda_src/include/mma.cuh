// Tensor-core building blocks that exist from sm_80 up: mma.sync, ldmatrix, cp.async.
//
// Fragments of mma.m16n8k16 (lane = 4 * group + pair, group 0..7, pair 0..3), two elements a
// register, the lower index in the lower half:
//   A 16x16 (row, k):  a[0] = (group, 2 pair), a[1] = (group + 8, 2 pair),
//                      a[2] = (group, 2 pair + 8), a[3] = (group + 8, 2 pair + 8)
//   B 16x8 (k, col):   b[0] = (2 pair, group), b[1] = (2 pair + 8, group)
//   C 16x8 (row, col): c[0], c[1] = (group, 2 pair), (group, 2 pair + 1); c[2], c[3]: row + 8
// So the C of one product, packed in pairs, is the A of the next (two n8 tiles make one k16).
#pragma once

#include "common.cuh"

// The 32-bit shared-memory address that the instructions below take.
__device__ __forceinline__ u32 smem_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes from global to shared memory in the background, both 16-byte aligned. With
// `valid` false nothing is read and zeros are written; `src` must then still be a valid address.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void cp_async_4(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `Pending` of this thread's committed groups are unfinished. Other threads'
// copies need a __syncthreads() after it.
template <int Pending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements: lanes 8i..8i+7 give the addresses of the eight
// 16-byte rows of matrix i, whose element (group, 2 pair), (group, 2 pair + 1) lands in r[i].
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed: r[i] holds elements (2 pair, group), (2 pair + 1, group).
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements, (group, 2 pair) and (group, 2 pair + 1) in a lane.
__device__ __forceinline__ u32 transpose_8x8(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c += a * b in float32 for bfloat16 or half inputs.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const u32 (&a)[4],
                                                            u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const u32 (&a)[4], u32 b0,
                                                     u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbouring elements of T as one register, and back.
template <typename T> __device__ __forceinline__ u32 pack2(float low, float high);
template <> __device__ __forceinline__ u32 pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}
template <> __device__ __forceinline__ u32 pack2<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

template <typename T> __device__ __forceinline__ float2 unpack2(u32 bits);
template <> __device__ __forceinline__ float2 unpack2<__nv_bfloat16>(u32 bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
template <> __device__ __forceinline__ float2 unpack2<__half>(u32 bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// Where 16-byte chunk `chunk` of row `row` lies, in chunks, in a shared tile with `Chunks` (a power
// of two) chunks a row, stored so that ldmatrix (eight rows of one column of chunks) and cp.async
// (whole rows) touch all banks once: eight chunks, 128 bytes, are one pass over the 32 banks.
template <int Chunks> __device__ __forceinline__ int swizzled_chunk(int row, int chunk) {
  static_assert((Chunks & (Chunks - 1)) == 0 && Chunks >= 4, "tile rows: 64, 128, 256, ... bytes");
  const int key = Chunks >= 8 ? row & 7 : (row >> 1) & 3;
  return row * Chunks + (chunk ^ key);
}
