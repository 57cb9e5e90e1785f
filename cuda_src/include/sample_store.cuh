// Sampling on the way out of the product that makes logits: of each row's sums in a tile only the
// best is kept, with its noise (token_race.cuh). In place of RowStore; matmul_sample_best.cu goes on.
//
// A warp puts 64 columns of its 16 rows together in shared memory, from where eight lanes take one
// row, and four columns at a time, as random words come. The best of each row so far, of all the
// tiles that the warp has had, is what the next ones have to beat.
#pragma once

#include "row_params.cuh"
#include "row_store.cuh"
#include "token_race.cuh"

// The shared memory of a warp: [16][64] sums, and for each of PARTS times 16 rows of x its best.
template <int PARTS> struct RacePieces {
  static constexpr int kCols = 64;
  static constexpr u32 kPitch = kCols * sizeof(float);
  static constexpr u32 kBytes = 16 * kPitch + PARTS * (16 * sizeof(Candidate) + 16);

  u32 buffer;

  __device__ __forceinline__ void use(u32 address) {
    buffer = address;
    const int lane = threadIdx.x % kWarpSize;
    if (lane < PARTS) store_shared(first_row(lane), ~0u);
  }

  __device__ __forceinline__ static void finish() {}

  // Where a row has its chunk-th 16 bytes, so that lanes of a fragment hit all banks.
  __device__ __forceinline__ u32 place(int row, int chunk) const {
    return buffer + row * kPitch + (chunk ^ row % 8 * 2) * 16;
  }

  // Where the first row of x is noted whose bests are here, and where these are.
  __device__ __forceinline__ u32 first_row(int part) const {
    return buffer + 16 * kPitch + part * (16 * sizeof(Candidate) + 16);
  }
  __device__ __forceinline__ u32 best(int part, int row) const {
    return first_row(part) + 16 + row * sizeof(Candidate);
  }
};

template <int BN, int PARTS> struct SampleStore {
  static_assert(BN % 64 == 0);
  using Output = float;
  using Pieces = RacePieces<PARTS>;
  static constexpr bool kSilu = false;

  struct Ahead {  // of row lane % 16
    float temperature;  // < 0: nobody wants a token
    uint2 seed;
    u32 position;
  };

  const i32* sample_slots;
  const i32* sample_positions;
  const RowParams* row_params;
  Candidate* candidates;  // [M, tiles_n]
  int M, vocab, tiles_n;
  Pieces pieces;

  __device__ __forceinline__ void load(Ahead& ahead, int row0, int) const {
    const int row = row0 + threadIdx.x % 16;
    const int slot = row < M ? sample_slots[row] : -1;
    ahead = {-1.0f, {0, 0}, 0};
    if (slot < 0) return;
    const RowParams& params = row_params[slot];
    ahead = {params.temperature,
             {params.seed[0], params.seed[1]},
             static_cast<u32>(sample_positions[row])};
  }

  __device__ __forceinline__ void store(const float (&sum)[BN / 2], const Ahead& ahead, int row0,
                                        int token0) const {
    const int lane = threadIdx.x % kWarpSize;
    const int part = row0 / 64 % PARTS;
    const bool other_rows = load_shared_u32(pieces.first_row(part)) != row0;
    __syncwarp();
    if (other_rows) {
      if (lane < 16) keep(part, lane, no_candidate());
      if (lane == 0) store_shared(pieces.first_row(part), static_cast<u32>(row0));
    }
#pragma unroll
    for (int chunk = 0; chunk < BN / 64; chunk++) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int i = 4 * (8 * chunk + j) + 2 * half;
          store_shared(pieces.place(lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8,
                       float2{sum[i], sum[i + 1]});
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int turn = 0; turn < 4; turn++) {
        run(ahead, part, lane / 8 + 4 * turn, token0 + 64 * chunk + lane % 8 * 4);
      }
    }
    __syncwarp();
    if (lane < 16 && row0 + lane < M) {
      candidates[(row0 + lane) * static_cast<i64>(tiles_n) + token0 / BN] = best_of(part, lane);
    }
  }

 private:
  __device__ __forceinline__ Candidate best_of(int part, int row) const {
    const float2 v = load_shared_2(pieces.best(part, row));
    return {v.x, __float_as_int(v.y)};
  }

  __device__ __forceinline__ void keep(int part, int row, Candidate best) const {
    store_shared(pieces.best(part, row), float2{best.value, __int_as_float(best.index)});
  }

  // Lets eight of a row's logits run: four from `token` on, and four from 32 tokens later.
  __device__ __forceinline__ void run(const Ahead& ahead, int part, int row, i32 token) const {
    constexpr int kGroups = 2;
    const int lane = threadIdx.x % kWarpSize;
    const float temperature = __shfl_sync(kFullMask, ahead.temperature, row);
    const uint2 seed = {__shfl_sync(kFullMask, ahead.seed.x, row),
                        __shfl_sync(kFullMask, ahead.seed.y, row)};
    const u32 position = __shfl_sync(kFullMask, ahead.position, row);
    Candidate best = best_of(part, row);
    Race race(temperature, best.value);
    if (temperature < 0.0f) race.reach = race.bar = CUDART_NAN_F;

    Vec<float, 4> values[kGroups], bound[kGroups];
    Vec<u32, 4> word[kGroups] = {};
    bool reaches = false;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const float4 v = load_shared_4(pieces.place(row, lane % 8 + 8 * g));
      values[g] = {v.x, v.y, v.z, v.w};
      if (token + 32 * g + 4 > vocab) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (token + 32 * g + i >= vocab) values[g].v[i] = CUDART_NAN_F;
        }
      }
      bound[g] = values[g];
      reaches = reaches || largest(values[g]) >= race.reach;
    }
    if (!__any_sync(kFullMask, reaches)) return;
    if (temperature > 0.0f) {
      const PhiloxKeys keys = philox_keys(seed);
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
        word[g] = race.words(keys, token + 32 * g, position);
        bound[g] = race.bounds(values[g], word[g]);
      }
    }
    reaches = false;
#pragma unroll
    for (int g = 0; g < kGroups; g++) reaches = reaches || largest(bound[g]) >= race.bar;
    if (!__any_sync(kFullMask, reaches)) return;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (!(bound[g].v[i] >= race.bar)) continue;
        const Candidate candidate{race.value(values[g].v[i], word[g].v[i]), token + 32 * g + i};
        if (before(candidate, best)) best = candidate;
      }
    }
    best = best_of_lanes<8>(best);
    __syncwarp();
    if (lane % 8 == 0) keep(part, row, best);
  }
};
