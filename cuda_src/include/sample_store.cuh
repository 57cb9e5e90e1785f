// Sampling on the way out of the product that makes logits: of each row's sums in a tile only the
// best is kept, with its noise (token_race.cuh). In place of RowStore; matmul_sample_best.cu goes on.
//
// The sums stay in the registers where the product leaves them: four lanes have a row, each every
// fourth pair of columns. As random words come for four columns, neighbours exchange pairs, so that
// each lane has groups of four. All of them are bounded; of each lane the logit with the largest
// bound then runs, and only where another one might still beat the best of these, all run that might.
#pragma once

#include "row_params.cuh"
#include "token_race.cuh"
#include "wgmma.cuh"

struct NoPieces {  // no shared memory: in place of RowPieces
  static constexpr u32 kBytes = 0;
  __device__ __forceinline__ static void use(u32) {}
  __device__ __forceinline__ static void finish() {}
};

template <int BN> struct SampleStore {
  static_assert(BN % 16 == 0);
  using Output = Candidate;
  using Pieces = NoPieces;
  static constexpr bool kSilu = false;

  struct Row {
    float temperature;  // < 0: nobody wants a token
    uint2 seed;
    u32 position;
  };
  using Ahead = Row[2];  // of the rows that a lane has sums of

  const i32* sample_slots;
  const i32* sample_positions;
  const RowParams* row_params;
  Candidate* candidates;  // [M, tiles_n]
  int M, vocab, tiles_n;
  Pieces pieces;

  __device__ __forceinline__ void load(Ahead& ahead, int row0, int) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row0 + threadIdx.x % kWarpSize / 4 + 8 * half;
      const int slot = row < M ? sample_slots[row] : -1;
      ahead[half] = {-1.0f, {0, 0}, 0};
      if (slot < 0) continue;
      const RowParams& params = row_params[slot];
      ahead[half] = {params.temperature,
                       {params.seed[0], params.seed[1]},
                       static_cast<u32>(sample_positions[row])};
    }
  }

  __device__ __forceinline__ void store(float (&sum)[BN / 2], const Ahead& ahead, int row0,
                                        int token0) const {
    const int lane = threadIdx.x % kWarpSize;
    wgmma_done(sum);
    if (token0 + BN > vocab) {
#pragma unroll
      for (int i = 0; i < BN / 2; i++) {
        if (token0 + column(i) >= vocab) sum[i] = CUDART_NAN_F;
      }
    }
    const float hottest = fmaxf(ahead[0].temperature, ahead[1].temperature);
    const bool greedy = !__any_sync(kFullMask, hottest > 0.0f);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Row& row = ahead[half];
      Candidate best = greedy ? largest_of(sum, half, token0) : race_of(sum, half, row, token0);
      if (row.temperature < 0.0f) best = no_candidate();
      const int m = row0 + lane / 4 + 8 * half;
      if (lane % 4 == 0 && m < M) {
        candidates[m * static_cast<i64>(tiles_n) + token0 / BN] = best;
      }
    }
  }

 private:
  // The column of a tile that this lane's sum i belongs to; i % 4 / 2 is its row.
  __device__ __forceinline__ static int column(int i) {
    return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
  }

  __device__ __forceinline__ static Candidate largest_of(const float (&sum)[BN / 2], int half,
                                                         i32 token0) {
    float most[4] = {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int i = 2 * half; i < BN / 2; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& of = most[i / 4 % 2 * 2 + e];
        of = fmaxf(of, sum[i + e]);
      }
    }
    const float value = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    i32 index = kNoIndex;
#pragma unroll
    for (int i = BN / 2 - 4 + 2 * half; i >= 0; i -= 4) {
#pragma unroll
      for (int e = 1; e >= 0; e--) {
        if (sum[i + e] == value) index = token0 + column(i + e);
      }
    }
    return best_of_lanes<4>({value, index});
  }

  __device__ __forceinline__ static Candidate race_of(float (&sum)[BN / 2], int half,
                                                      const Row& row, i32 token0) {
    const int lane = threadIdx.x % kWarpSize;
    const bool odd = lane % 2;
    const i32 token = token0 + lane % 2 * 8 + lane % 4 / 2 * 4;  // the first of this lane's groups
    const PhiloxKeys keys = philox_keys(row.seed);
    Race race(row.temperature);
    float most = -CUDART_INF_F, other = -CUDART_INF_F;  // bounds: the largest, and of the others
    Vec<float, 4> values = {CUDART_NAN_F, CUDART_NAN_F, CUDART_NAN_F, CUDART_NAN_F};
    Vec<u32, 4> words = {};
    i32 group = token;
#pragma unroll
    for (int m = 0; m < BN / 16; m++) {
      const int i = 8 * m + 2 * half;
      const float2 keep = odd ? float2{sum[i + 4], sum[i + 5]} : float2{sum[i], sum[i + 1]};
      const float2 give = odd ? float2{sum[i], sum[i + 1]} : float2{sum[i + 4], sum[i + 5]};
      const float2 have = {__shfl_xor_sync(kFullMask, give.x, 1),
                           __shfl_xor_sync(kFullMask, give.y, 1)};
      const float2 first = odd ? have : keep, last = odd ? keep : have;
      const Vec<float, 4> these = {first.x, first.y, last.x, last.y};
      const Vec<u32, 4> random = race.words(keys, token + 16 * m, row.position);
      const float bound = largest(race.bounds(these, random));
      const bool more = bound > most;
      other = fmaxf(other, more ? most : bound);
      if (more) {
        most = bound;
        values = these;
        words = random;
        group = token + 16 * m;
      }
    }
    const Vec<float, 4> bounds = race.bounds(values, words);
    Candidate best = no_candidate();
    float value = 0.0f;
    u32 word = 0;
    float top = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool more = bounds.v[i] > top;
      other = fmaxf(other, more ? top : bounds.v[i]);
      if (more) {
        top = bounds.v[i];
        value = values.v[i];
        word = words.v[i];
        best.index = group + i;
      }
    }
    if (best.index != kNoIndex) best.value = race.value(value, word);
    best = best_of_lanes<4>(best);
    race.pass(best.value);
    const bool open = row.temperature >= 0.0f && other >= race.bar;
    return __any_sync(kFullMask, open) ? finish(sum, half, race, keys, row.position, token0) : best;
  }

  // Lets all run that reach the bar. As registers have no index, all of the row's sums move on for the
  // next two pairs; in the end they are back.
  __device__ __forceinline__ static Candidate finish(float (&sum)[BN / 2], int half,
                                                     const Race& race, const PhiloxKeys& keys,
                                                     u32 position, i32 token0) {
    const bool odd = threadIdx.x % 2;
    Candidate best = no_candidate();
#pragma unroll 1
    for (int m = 0; m < BN / 16; m++) {
#pragma unroll
      for (int i = 2 * half; i < 8; i += 4) {
        const i32 token = token0 + 16 * m + column(i);
        const Vec<u32, 4> words = race.words(keys, token, position);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const u32 word = odd ? words.v[2 + e] : words.v[e];
          if (!(race.bound(sum[i + e], word) >= race.bar)) continue;
          const Candidate candidate{race.value(sum[i + e], word), token + e};
          if (before(candidate, best)) best = candidate;
        }
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (i % 4 / 2 != half) continue;
        const float front = sum[i];
#pragma unroll
        for (int j = i; j < BN / 2 - 8; j += 8) sum[j] = sum[j + 8];
        sum[BN / 2 - 8 + i] = front;
      }
    }
    return best_of_lanes<4>(best);
  }
};
