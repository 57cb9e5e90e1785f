// The parameters of a row slot: state row_params [SLOTS], and what one edit of it looks like.
#pragma once

#include "common.cuh"

// As ROW_PARAMS in tinyvllm/ops/row_params.py. Alignment: a row is four 16-byte accesses.
struct alignas(16) RowParams {
  i32 slot;
  i32 position;       // in the sequence, of the next token to be computed
  i32 token;          // that token, where it is to be taken from the row state
  float temperature;  // 0: greedy
  u32 seed[2];        // low and high word
  i32 top_k;          // off: 0
  float top_p;        // off: 1
  float min_p;        // off: 0
  i32 prompt_len;
  float repetition;   // penalties; off: 1
  float presence;     // off: 0
  float frequency;    // off: 0
  i32 num_bias;       // valid entries of row_bias_tokens, _values and _until
  i32 num_bad_words;  // valid entries of row_bad_words
  i32 counted;        // 1: token_counts and row_history are kept for this row
};
static_assert(sizeof(RowParams) == 64, "16 words");
