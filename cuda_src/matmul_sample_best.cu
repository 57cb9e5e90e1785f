// tokens[s] = the token of the best of row s's candidates, which matmul_sample_kernel in
// matmul_hopper.cu has left; 0 if there is none.
//
// candidates [S, per_row]. Work: a block a row. Bound: 8 bytes read for each candidate, from L2.
#include "reduce.cuh"

__global__ void __launch_bounds__(128)
    matmul_sample_best_kernel(const Candidate* candidates, i32* tokens, i32 per_row) {
  start_next();
  wait_for_previous();
  __shared__ Candidate scratch[kMaxWarps];
  const Candidate* const row = candidates + static_cast<i64>(blockIdx.x) * per_row;
  Candidate best = no_candidate();
#pragma unroll 4
  for (i32 i = threadIdx.x; i < per_row; i += blockDim.x) {
    const Candidate candidate = row[i];
    if (before(candidate, best)) best = candidate;
  }
  best = block_best(best, scratch);
  if (threadIdx.x == 0) tokens[blockIdx.x] = best.index == kNoIndex ? 0 : best.index;
}
