// What a request changes in its logits, and the counts of tokens that this depends on.
//
//   token_counts [slots, vocab]  kInPrompt if the prompt has the token, plus its number of times in
//                                the output
//   row_history [slots, 8]       the last tokens, each at its position % 8
//   row_bias_tokens, _values, _until [slots, max_bias]: the value is added to the token's logit
//                                while the sampled position lies below `until`; -inf forbids it
//   row_bad_words [slots, max_bad_words, 8]: a token, n, and the n tokens before it in the word
//
// reset_counts zeroes the counts of slots in which a row joins; count_tokens counts a step's input
// tokens; adjust_logits computes, for each sampled row,
//
//   x  = logit + bias
//   x  = x > 0 ? x / repetition : x * repetition       tokens in prompt or output
//   x  = (x - frequency * times) - presence             tokens in the output
//   x  = -inf                                           forbidden tokens, last tokens of bad words
//
// Rows that are not counted have no penalties and keep no counts; rows with slot -1 are padding.
// Every operation is rounded as in tinyvllm/ops/logit_adjust.py, so results agree to the bit.
//
// Work: kChunk logits or counts a block, coalesced; a thread a token in count_tokens. The lists are
// short: each block of a row goes through all of them for the tokens in its chunk.
// Bound: S * vocab * 4 bytes each of logits, counts and output.
#include <math_constants.h>

#include "row_params.cuh"

constexpr int kThreads = 256;
constexpr int kChunk = 4096;  // as in tinyvllm/ops/logit_adjust.py
constexpr i32 kInPrompt = 1 << 30;
constexpr i32 kOutputCount = kInPrompt - 1;
constexpr int kHistory = 8;
constexpr int kBadWordWords = 8;

// row_edits [max_edits], of which the first edit_counts[0] are valid. Block (x, edit).
__global__ void __launch_bounds__(kThreads)
    reset_counts_kernel(const i32* edit_counts, const RowParams* row_edits, i32* token_counts,
                        i32 vocab) {
  start_next();
  wait_for_previous();
  const int edit = blockIdx.y;
  if (edit >= edit_counts[0] || row_edits[edit].counted == 0) return;
  i32* counts = token_counts + static_cast<i64>(row_edits[edit].slot) * vocab;
  const i32 begin = blockIdx.x * kChunk, end = min(begin + kChunk, vocab);
  for (i32 v = begin + threadIdx.x; v < end; v += kThreads) counts[v] = 0;
}

__global__ void __launch_bounds__(kThreads)
    count_tokens_kernel(const i32* token_ids, const i32* positions, const i32* token_slots,
                        const RowParams* row_params, i32* token_counts, i32* row_history,
                        i32 num_tokens, i32 vocab) {
  start_next();
  wait_for_previous();
  const int t = blockIdx.x * kThreads + threadIdx.x;
  if (t >= num_tokens) return;
  const i32 slot = token_slots[t];
  if (slot < 0 || row_params[slot].counted == 0) return;
  const i32 token = token_ids[t], position = positions[t];
  i32* count = token_counts + static_cast<i64>(slot) * vocab + token;
  if (position < row_params[slot].prompt_len) {
    atomicOr(count, kInPrompt);
  } else {
    atomicAdd(count, 1);  // a chunk after a preemption may hold a token several times
  }
  // A row's tokens are neighbours: only its last kHistory ones of the step have a place each.
  const int later = t + kHistory;
  if (later >= num_tokens || token_slots[later] != slot) {
    row_history[slot * kHistory + position % kHistory] = token;
  }
}

struct Penalties {
  float repetition, presence, frequency;

  __device__ __forceinline__ float operator()(float x, i32 count) const {
    if (count == 0) return x;
    x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    const i32 times = count & kOutputCount;
    x = __fsub_rn(x, __fmul_rn(frequency, static_cast<float>(times)));
    return times > 0 ? __fsub_rn(x, presence) : x;
  }
};

// Whether the output, whose next token is at `position`, ends with what precedes the word's last.
__device__ __forceinline__ bool ends_with(const i32* word, const i32* history, i32 position,
                                          i32 prompt_len) {
  const i32 length = word[1], first = position - length;
  if (first < prompt_len) return false;
  for (int i = 0; i < length; ++i) {
    if (history[(first + i) % kHistory] != word[2 + i]) return false;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads)
    adjust_logits_kernel(const float* logits, const i32* sample_slots,
                         const i32* sample_positions,
                         const RowParams* row_params,
                         const i32* token_counts, const i32* row_history,
                         const i32* row_bias_tokens,
                         const float* row_bias_values,
                         const i32* row_bias_until,
                         const i32* row_bad_words, float* adjusted,
                         i32 vocab, i32 max_bias, i32 max_bad_words) {
  start_next();
  wait_for_previous();
  const i64 s = blockIdx.y, slot = sample_slots[s];
  const i32 begin = blockIdx.x * kChunk, end = min(begin + kChunk, vocab);
  const float* in = logits + s * vocab;
  float* out = adjusted + s * vocab;
  if (slot < 0 || row_params[slot].counted == 0) {
#pragma unroll 4
    for (i32 v = begin + threadIdx.x; v < end; v += kThreads) out[v] = in[v];
    if (slot < 0) return;
  }
  const RowParams& row = row_params[slot];
  const i32* counts = token_counts + slot * vocab;
  const bool counted = row.counted != 0;
  const Penalties penalised = {row.repetition, row.presence, row.frequency};
  if (counted) {
#pragma unroll 4
    for (i32 v = begin + threadIdx.x; v < end; v += kThreads) {
      out[v] = penalised(in[v], counts[v]);
    }
  }
  if (row.num_bias == 0 && row.num_bad_words == 0) return;

  // Single tokens over again, from the model's logits; then, last, those that are forbidden.
  const i32 position = sample_positions[s];
  const i64 list = slot * max_bias;
#pragma unroll 1
  for (int forbid = 0; forbid < 2; ++forbid) {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < row.num_bias; i += kThreads) {
      const i32 token = row_bias_tokens[list + i];
      if (token < begin || token >= end || position >= row_bias_until[list + i]) continue;
      const float value = row_bias_values[list + i];
      if ((value == -CUDART_INF_F) != (forbid == 1)) continue;
      const float x = __fadd_rn(in[token], value);
      out[token] = forbid ? value : counted ? penalised(x, counts[token]) : x;
    }
  }
  for (int i = threadIdx.x; i < row.num_bad_words; i += kThreads) {
    const i32* word = row_bad_words + (slot * max_bad_words + i) * kBadWordWords;
    if (word[0] < begin || word[0] >= end) continue;
    if (ends_with(word, row_history + slot * kHistory, position, row.prompt_len)) {
      out[word[0]] = -CUDART_INF_F;
    }
  }
}
