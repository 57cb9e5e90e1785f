// Weights on their way to L2 before the kernel that reads them has started (sm_90 and newer).
#pragma once

#include "common.cuh"

// Asks for this block's share of `bytes` at `begin`, multiples of 16; waits for nothing.
__device__ __forceinline__ void prefetch_share(const void* begin, int bytes) {
#if __CUDA_ARCH__ >= 900
  constexpr int kPiece = 4096;
  const u32 pieces = ceil_div(bytes, kPiece);
  // Pieces are counted, not bytes, which are too many for 32 bits where a grid has 4,096 blocks.
  for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < pieces; i += blockDim.x * gridDim.x) {
    const int at = i * kPiece;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const u8*>(begin) +
                                                                  at),
                 "r"(min(kPiece, bytes - at)));
  }
#endif
}
