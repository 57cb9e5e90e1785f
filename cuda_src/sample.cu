// tokens[s] = argmax over v of logits[s, v] + temperature * g, where logits[s, v] >= min_logit[s]
//
// which draws v with the probabilities of softmax(logits / temperature) (the Gumbel-max trick), for
// Gumbel noise g = -log(-log(u)) of a uniform u; temperature 0 is greedy. Scaling the noise, not
// the logits, can't overflow. u = 1 - w, where w is a random word scaled to (0, 1), so that
// -log(u) = -log1p(-w) keeps its relative precision where g is large, where the winners are. The
// word is number v % 4 of Philox4x32-10 with the row's seed as key and the counter
// (v / 4, position, 0, 0): it depends on the seed and the position only, never on the batch.
// Ties go to the lowest v; if all is NaN or too low, and for padding (slot -1), the token is 0.
//
// logits [S, vocab] float32 contiguous; temperature and seed by slot (row_params.cuh).
// Work: block (c, s) of the first kernel finds the best of the kChunk logits of chunk c in row s,
// one warp per row of the second the best of the chunks. Being an argmax over a total order, the
// result does not depend on the chunks. Bound: S * vocab * 4 bytes read, once.
#include "logits.cuh"
#include "philox.cuh"
#include "reduce.cuh"
#include "row_params.cuh"

constexpr int kThreads = 256;
constexpr int kChunk = 2048;

__device__ __forceinline__ float gumbel(u32 word) {
  const float w = fminf((__uint2float_rn(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return -logf(-log1pf(-w));
}

template <bool ALIGNED, bool FILTERED>
__global__ void __launch_bounds__(kThreads)
    sample_chunk_kernel(const float* logits, const i32* sample_slots, const i32* sample_positions,
                        const RowParams* row_params, const float* min_logit, Candidate* partial,
                        i32 vocab) {
  start_next();
  wait_for_previous();
  __shared__ Candidate scratch[kMaxWarps];
  const i64 s = blockIdx.y;
  const i32 slot = sample_slots[s];
  if (slot < 0) return;
  const float temperature = row_params[slot].temperature;
  const uint2 seed = make_uint2(row_params[slot].seed[0], row_params[slot].seed[1]);
  const float lowest = FILTERED ? min_logit[s] : -CUDART_INF_F;
  const u32 position = sample_positions[s];
  Candidate best = no_candidate();
#pragma unroll
  for (int n = 0; n < kChunk / (4 * kThreads); ++n) {
    const i32 first = blockIdx.x * kChunk + (n * kThreads + threadIdx.x) * 4;
    if (first >= vocab) break;
    Vec<float, 4> values = load_logits<ALIGNED>(logits + s * vocab, first, vocab);
    if constexpr (FILTERED) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (values.v[i] < lowest) values.v[i] = CUDART_NAN_F;
      }
    }
    if (temperature > 0.0f) {
      const uint4 words = philox4x32(make_uint4(first / 4, position, 0, 0), seed);
      const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values.v[i] = __fadd_rn(values.v[i], __fmul_rn(temperature, gumbel(word[i])));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Candidate candidate{values.v[i], first + i};
      if (before(candidate, best)) best = candidate;
    }
  }
  best = block_best(best, scratch);
  if (threadIdx.x == 0) partial[s * gridDim.x + blockIdx.x] = best;
}

__global__ void __launch_bounds__(kWarpSize)
    sample_merge_kernel(const Candidate* partial, const i32* sample_slots, i32* tokens,
                        i32 num_chunks) {
  start_next();
  wait_for_previous();
  const i64 s = blockIdx.x;
  if (sample_slots[s] < 0) {
    if (threadIdx.x == 0) tokens[s] = 0;
    return;
  }
  Candidate best = no_candidate();
  for (int c = threadIdx.x; c < num_chunks; c += kWarpSize) {
    const Candidate candidate = partial[s * num_chunks + c];
    if (before(candidate, best)) best = candidate;
  }
  best = warp_best(best);
  if (threadIdx.x == 0) tokens[s] = best.index == kNoIndex ? 0 : best.index;
}
