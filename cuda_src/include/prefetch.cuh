// Weights on their way to L2 before the kernel that reads them has started (sm_90 and newer).
#pragma once

#include "common.cuh"

// Asks for this block's share of `bytes` at `begin`, a multiple of 16; waits for nothing.
__device__ __forceinline__ void prefetch_share(const u8* begin, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  constexpr u32 kPiece = 4096;
  for (u32 at = (blockIdx.x + threadIdx.x * gridDim.x) * kPiece; at < bytes;
       at += blockDim.x * gridDim.x * kPiece) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin + at),
                 "r"(min(kPiece, bytes - at)));
  }
#endif
}
