// Log-softmax of raw logits: the targets' values and ranks, and the `num_top` best of each row.
//
// logprob(v) = (x[v] - max) - log(sum of exp(x - max)); rank = 1 + number of logits above the
// target's; best first, ties by index. NaN logits count as -infinity.
//
// logits [S, vocab] float32 contiguous, targets [S], target_logprob and target_rank [S], top_ids
// and top_logprobs [S, num_top].
//
// Work: one block per row. Thread t owns the groups of four logits t, t + 1024, ... and keeps the
// best that it has not yet given up. The best of the block is taken num_top times; each time the
// warp of the thread that owned it looks through that thread's logits for the next one, so the
// row is passed over twice in all. Bound: S * vocab * 4 bytes read (the second pass hits L2).
#include "logits.cuh"
#include "reduce.cuh"

constexpr int kThreads = 1024;

__device__ __forceinline__ float or_lowest(float x) { return isnan(x) ? -CUDART_INF_F : x; }

// The best of logits first ... first + 3 that come after `last` in the order of candidates, or
// `best` if that is better.
template <bool ALIGNED>
__device__ __forceinline__ Candidate best_after(Candidate last, Candidate best, const float* row,
                                                i32 first, i32 vocab) {
  const Vec<float, 4> values = load_logits<ALIGNED>(row, first, vocab);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Candidate candidate{or_lowest(values.v[i]), first + i};
    if (before(last, candidate) && before(candidate, best)) best = candidate;
  }
  return best;
}

template <bool ALIGNED>
__global__ void __launch_bounds__(kThreads)
    logprobs_kernel(const float* logits, const i32* targets, float* target_logprob,
                    i32* target_rank, i32* top_ids, float* top_logprobs, i32 vocab, i32 num_top) {
  start_next();
  wait_for_previous();
  __shared__ Candidate best_scratch[kMaxWarps];
  __shared__ float sum_scratch[kMaxWarps];
  __shared__ i32 count_scratch[kMaxWarps];
  const i64 s = blockIdx.x;
  const float* row = logits + s * vocab;
  const i32 target = targets[s];
  const float target_value = or_lowest(row[target]);

  const Candidate none{CUDART_INF_F, -1};  // before every candidate
  Candidate mine = no_candidate();
  for (i32 first = threadIdx.x * 4; first < vocab; first += kThreads * 4) {
    mine = best_after<ALIGNED>(none, mine, row, first, vocab);
  }
  Candidate top = block_best(mine, best_scratch);
  const float max = top.value;

  float sum = 0.0f;
  i32 above = 0;
  for (i32 first = threadIdx.x * 4; first < vocab; first += kThreads * 4) {
    const Vec<float, 4> values = load_logits<ALIGNED>(row, first, vocab);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = or_lowest(values.v[i]);
      if (first + i < vocab) sum += expf(value - max);
      above += value > target_value;
    }
  }
  const float log_sum = logf(block_sum(sum, sum_scratch));
  above = block_sum(above, count_scratch);
  if (threadIdx.x == 0) {
    target_logprob[s] = target_value - max - log_sum;
    target_rank[s] = above + 1;
  }

  for (int p = 0; p < num_top; ++p) {
    if (threadIdx.x == 0) {
      top_ids[s * num_top + p] = top.index;
      top_logprobs[s * num_top + p] = top.value - max - log_sum;
    }
    const int owner = top.index / 4 % kThreads;
    if (threadIdx.x / kWarpSize == owner / kWarpSize) {
      const int lane = threadIdx.x % kWarpSize;
      Candidate next = no_candidate();
      for (i32 first = (owner + lane * kThreads) * 4; first < vocab;
           first += kWarpSize * kThreads * 4) {
        next = best_after<ALIGNED>(top, next, row, first, vocab);
      }
      next = warp_best(next);
      if (threadIdx.x == owner) mine = next;
    }
    top = block_best(mine, best_scratch);
  }
}
