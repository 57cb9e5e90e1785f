// Reads pages of memory in the order of a list and does nothing with them: the rate to measure
// paged attention by.
//
// Page i starts `pages[i] * page_stride` bytes behind `base`, has `page_bytes` (a multiple of 16)
// and starts on 16 bytes. out: 16 bytes, written if all words of what a thread read are equal to
// `impossible` when combined; so nothing may be left out.
//
// Work: a block takes every gridDim.x-th page, neighbouring threads neighbouring 16 bytes, with
// kUnroll loads in flight. Bound: the pages' bytes read, once.
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kUnroll = 8;

__global__ void __launch_bounds__(kThreads)
    read_pages_kernel(const u8* base, const i32* pages, u32* out, i32 num_pages, i32 page_bytes,
                      i64 page_stride, u32 impossible) {
  u32 all = 0;
  for (int p = blockIdx.x; p < num_pages; p += gridDim.x) {
    const uint4* page = reinterpret_cast<const uint4*>(base + pages[p] * page_stride);
#pragma unroll kUnroll
    for (int i = threadIdx.x; i < page_bytes / 16; i += kThreads) {
      const uint4 v = page[i];
      all |= v.x | v.y | v.z | v.w;
    }
  }
  if (all == impossible) out[threadIdx.x % 4] = all;
}
