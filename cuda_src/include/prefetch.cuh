// Weights on their way to L2 before the kernel that reads them has started (sm_90 and newer).
#pragma once

#include "common.cuh"

// Asks for this block's share of `bytes` at `begin`, multiples of 16; waits for nothing.
__device__ __forceinline__ void prefetch_share(const void* begin, int bytes) {
#if __CUDA_ARCH__ >= 900
  constexpr int kPiece = 4096;
  for (int at = (blockIdx.x + threadIdx.x * gridDim.x) * kPiece; at < bytes;
       at += blockDim.x * gridDim.x * kPiece) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const u8*>(begin) +
                                                                  at),
                 "r"(min(kPiece, bytes - at)));
  }
#endif
}
