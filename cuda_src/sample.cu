// tokens[s] = argmax over v of logits[s, v] + temperature * g, of the v that the filters leave
//
// which draws v with the probabilities of softmax(logits / temperature) (the Gumbel-max trick), for
// Gumbel noise g; temperature 0 is greedy. Scaling the noise, not the logits, can't overflow. The
// noise comes from word v % 4 of Philox4x32-7 with the row's seed as key and the counter
// (v / 4, position, 0, 0): it depends on the seed and the position only, never on the batch. Ties
// go to the lowest v; if all is NaN, and for padding (slot -1), the token is 0. FILTERED, of rows
// with a temperature there are left, NaN and -infinity aside,
//
//   min_p   logits whose weight (token_weight.cuh) is at least min_p times that of the best
//   top_k   of these the k largest
//   top_p   of these each one such that the larger ones have less than top_p of the weight of all
//
// and those equal to one that is left. As weights are integers and an argmax over a total order has
// no order of its own, the result does not depend on how a row is shared out.
//
// logits [S, vocab] float32 contiguous; parameters by slot (row_params.cuh).
//
// Work: a cluster of CLUSTER blocks a row, which deal out its tiles of 4 * THREADS logits in turn.
// Few rows are read once, into shared memory, where all passes over them are; with many, fewer and
// longer blocks are faster, though they read their row again in each pass. Noise is computed for
// what may beat the warp's best (token_race.cuh).
//   Few may be left: the j-th largest of the threads' maxima, k <= j * CLUSTER, bounds the k-th
//   largest from below in each block, so also the least of these; min_p bounds by the best. What
//   reaches the bound goes to the first block, which ranks it, sums it and draws from it alone.
//   Else the k-th largest is found bit by bit, and no threshold is searched for top_p: if too much
//   lies above the winner, it is not left, and nor is anything below it: the winner among those
//   above is next.
// Bound: S * vocab * 4 bytes read, once; with noise for all, also instructions: 20 a logit.
#include "kth_largest.cuh"
#include "row_params.cuh"
#include "row_part.cuh"
#include "token_race.cuh"
#include "token_weight.cuh"

// top_p alone: what weighs less than 2^-kDepth of the best is hoped to lie outside of it.
constexpr float kDepth = 10.0f;

// The best logit with noise of those from `lowest` up that weigh at least `floor`.
template <typename PartT, typename Weigh>
__device__ __forceinline__ Candidate winner(PartT& part, float lowest, float temperature,
                                            uint2 seed, u32 position, u64 floor, Weigh weight) {
  Race race(temperature, -CUDART_INF_F, lowest);
  const PhiloxKeys keys = philox_keys(seed);
  Candidate best = no_candidate();
  part.for_each([&](const Vec<float, 4>& values, u32 index) {
    if (!__any_sync(kFullMask, largest(values) >= race.reach)) return;
    Vec<u32, 4> word = {};
    Vec<float, 4> bound = values;
    if (temperature > 0.0f) {
      word = race.words(keys, index, position);
      bound = race.bounds(values, word);
      if (!__any_sync(kFullMask, largest(bound) >= race.bar)) return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(values.v[i] >= lowest && bound.v[i] >= race.bar)) continue;
      const Candidate candidate{race.value(values.v[i], word.v[i]), static_cast<i32>(index) + i};
      if (before(candidate, best) && (floor == 0 || weight(values.v[i]) >= floor)) {
        best = candidate;
      }
    }
    race.pass(warp_max(best.value), lowest);
  });
  best = over_block(best, no_candidate(), part.shared.candidates, warp_best);
  return part.exchange(best, no_candidate(), &Shared::Message::candidates, warp_best);
}

// The least logit that may weigh floor_log2 octaves below the best, or a little less.
__device__ __forceinline__ float bound_of(float best, float scale, float floor_log2) {
  return __fadd_rd(best, __fdiv_rd(floor_log2 - 0.01f, scale));
}

// Draws from the n logits kept in this block: of those the k largest, and of these what top_p
// leaves, whose target is 0 if it is for those k.
template <typename PartT>
__device__ __forceinline__ i32 draw_kept(PartT& part, int n, int k, float p, u64 target,
                                         float temperature, uint2 seed, u32 position) {
  constexpr int kThreads = PartT::kThreads, kOwn = ceil_div(kMaxKept, kThreads);
  constexpr int kPer = kMaxKept / PartT::kBlocks;
  Shared& shared = part.shared;
  Kept own[kOwn];
  int rank[kOwn];
  u64 above[kOwn];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {  // closes the gaps between the blocks' parts
    const int place = threadIdx.x + j * kThreads;
    int block = 0, skipped = 0;
    for (; block < PartT::kBlocks - 1 && place - skipped >= shared.shares[block].count; ++block) {
      skipped += shared.shares[block].count;
    }
    own[j] = shared.kept[place < n ? block * kPer + place - skipped : 0];
    rank[j] = place < n ? 0 : kMaxKept;
    above[j] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (rank[j] == 0) shared.kept[threadIdx.x + j * kThreads] = own[j];
  }
  __syncthreads();
  float raced[kOwn];
  u64 all = 0;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (rank[j] != 0) continue;
    const u32 key = own[j].key;
    if (k > 0 || p < 1.0f) {
#pragma unroll 4
      for (int i = 0; i < n; ++i) {
        const Kept other = shared.kept[i];
        if (other.key > key) ++rank[j], above[j] += other.weight;
      }
    }
    const i32 index = own[j].index;
    const uint4 words = philox4x32(make_uint4(index / 4, position, 0, 0), philox_keys(seed));
    const u32 word = index % 4 < 2 ? (index % 4 == 0 ? words.x : words.y)
                                   : (index % 4 == 2 ? words.z : words.w);
    raced[j] = __fadd_rn(value_of(key), __fmul_rn(temperature, gumbel(word)));
    if (k > 0 && rank[j] >= k) rank[j] = kMaxKept;
    if (rank[j] < kMaxKept) all += own[j].weight;
  }
  if (p < 1.0f && target == 0) {
    all = over_block(all, u64{0}, &shared.sums[0].all, warp_sum_u64);
    target = __double2ull_ru(p * __ull2double_rn(all));
  }
  Candidate best = no_candidate();
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const Candidate candidate{raced[j], own[j].index};
    if (rank[j] < kMaxKept && (p >= 1.0f || above[j] < target) && before(candidate, best)) {
      best = candidate;
    }
  }
  return block_best(best, shared.candidates).index;
}

template <bool ALIGNED, bool FILTERED, int THREADS, int CLUSTER, int TILES>
__global__ void __launch_bounds__(THREADS, THREADS == 256 ? 3 : 1024 / THREADS)
    sample_kernel(const float* logits, const i32* sample_slots, const i32* sample_positions,
                  const RowParams* row_params, i32* tokens, i32 vocab) {
  start_next();
  wait_for_previous();
  extern __shared__ __align__(16) unsigned char smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  float* staged = reinterpret_cast<float*>(smem + sizeof(Shared)) + threadIdx.x * 4;
  const i64 s = blockIdx.y;
  RowPart<ALIGNED, THREADS, CLUSTER, TILES> part{
      shared, logits + s * vocab, staged, static_cast<i32>(blockIdx.x * THREADS + threadIdx.x) * 4,
      vocab,  0};
  if constexpr (TILES == 0) part.stage();
  if (threadIdx.x == 0) shared.num_kept = 0;
  part.sync();  // all blocks of the cluster run, so that their shared memory may be written
  const i32 slot = sample_slots[s];
  if (slot < 0) {  // in all blocks of the cluster
    if (TILES == 0) cp_async_wait<0>();
    if (blockIdx.x == 0 && threadIdx.x == 0) tokens[s] = 0;
    return;
  }
  const RowParams params = row_params[slot];
  const float temperature = params.temperature;
  const uint2 seed = make_uint2(params.seed[0], params.seed[1]);
  const u32 position = sample_positions[s];
  if constexpr (TILES == 0) cp_async_wait<0>();

  const int k = params.top_k;
  const float p = params.top_p, min_p = params.min_p;
  float lowest = -CUDART_INF_F;
  u64 floor = 0;
  float best = CUDART_NAN_F;
  bool filter = FILTERED && temperature > 0.0f && (k > 0 || p < 1.0f || min_p > 0.0f);
  if (FILTERED && filter) {
    float mine = -CUDART_INF_F;
    part.template for_each<4>(
        [&](const Vec<float, 4>& values, i32) { mine = fmaxf(mine, largest(values)); });
    const int lane = threadIdx.x % kWarpSize;
    shared.maxima[threadIdx.x] = key_of(mine);
    u32 best_key = warp_max_key(key_of(mine));
    if (lane == 0) shared.keys[threadIdx.x / kWarpSize] = best_key;
    __syncthreads();
    best_key = warp_max_key(shared.keys[lane % (THREADS / kWarpSize)]);
    const int j = ceil_div(k, CLUSTER);
    const u32 bound = k > 0 && j <= THREADS
                          ? kth_largest<THREADS / kWarpSize, 17>(shared.maxima, THREADS, j)
                          : 0;
    const uint2 keys = part.exchange(
        make_uint2(best_key, bound), make_uint2(0, ~0u), &Shared::Message::keys, [](uint2 x) {
          return make_uint2(warp_max_key(x.x), warp_min_key(x.y));
        });
    best = value_of(keys.x);
    filter = keys.x > kLowestKey;
    if (filter) {
      const TokenWeight weight(best, temperature);
      const bool sum_all = k == 0 && p < 1.0f;
      float least = keys.y > kLowestKey ? value_of(keys.y) : -CUDART_INF_F;
      if (min_p > 0.0f) {
        floor = __double2ull_ru(static_cast<double>(min_p) * 0x1p40);
        least = fmaxf(least, bound_of(best, weight.scale, log2f(min_p)));
      }
      if (sum_all) least = fmaxf(least, bound_of(best, weight.scale, -kDepth));
      constexpr int kPer = kMaxKept / CLUSTER;
      Kept* to = at_rank(&shared, 0)->kept + blockIdx.x * kPer;
      u64 all = 0, kept = 0;
      if (sum_all || mine >= least) {
        part.for_each([&](const Vec<float, 4>& values, i32 index) {
          if (!sum_all && !(largest(values) >= least)) return;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float x = values.v[i];
            const bool keep = x >= least && x > -CUDART_INF_F;
            if (!keep && !sum_all) continue;
            const u64 w = weight(x);
            if (w < floor) continue;
            all += w;
            if (!keep) continue;
            kept += w;
            const int place = atomicAdd(&shared.num_kept, 1);
            if (place < kPer) to[place] = {w, key_of(x), index + i};
          }
        });
      }
      Sums sums = {all, kept};
      if (sum_all) sums = over_block(sums, Sums{0, 0}, shared.sums, warp_sums);
      __syncthreads();
      if (threadIdx.x < CLUSTER) {
        at_rank(&shared, lane)->shares[blockIdx.x] = {sums.all, sums.above, shared.num_kept};
      }
      part.sync();
      Share share = {0, 0, 0};
      if (lane < CLUSTER) share = shared.shares[lane];
      u64 target = 0;
      bool few = !__any_sync(kFullMask, share.count > kPer);
      if (few && sum_all) {
        sums = warp_sums({share.all, share.kept});
        target = __double2ull_ru(p * __ull2double_rn(sums.all));
        few = sums.above >= target;
      }
      if (few) {
        if (blockIdx.x > 0) return;
        const int n = warp_sum(share.count);
        const i32 token = draw_kept(part, n, k, p, target, temperature, seed, position);
        if (threadIdx.x == 0) tokens[s] = token;
        return;
      }
      if (k > 0) {
        const u32 kth = kth_of_row(part, k);
        if (kth > kLowestKey) lowest = value_of(kth);
      }
    }
  }
  const TokenWeight weight(best, temperature);
  u64 target = 0;  // of top_p, once it is known
#pragma unroll 1
  for (float from = lowest;;) {
    const Candidate won =
        winner(part, from, temperature, seed, position, filter ? floor : 0, weight);
    const i32 token = won.index == kNoIndex ? 0 : won.index;
    Sums sums = {0, 0};
    float logit = 0.0f;
    if (FILTERED && filter && p < 1.0f) {
      logit = part.row[token];
      const float first = target == 0 ? lowest : logit;
      part.for_each([&](const Vec<float, 4>& values, i32) {
        if (!__any_sync(kFullMask, largest(values) >= first)) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u64 w = values.v[i] >= first ? weight(values.v[i]) : 0;
          if (w < floor) continue;
          sums.all += w;
          if (values.v[i] > logit) sums.above += w;
        }
      });
      sums = over_block(sums, Sums{0, 0}, shared.sums, warp_sums);
      sums = part.exchange(sums, Sums{0, 0}, &Shared::Message::sums, warp_sums);
      if (target == 0) target = __double2ull_ru(p * __ull2double_rn(sums.all));
    }
    if (sums.above >= target && target > 0) {
      from = value_of(key_of(logit) + 1);
      continue;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) tokens[s] = token;
    break;
  }
}
