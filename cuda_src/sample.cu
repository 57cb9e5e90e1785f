// tokens[s] = argmax over v of logits[s, v] + temperature * g, of the v that the filters leave
//
// which draws v with the probabilities of softmax(logits / temperature) (the Gumbel-max trick), for
// Gumbel noise g; temperature 0 is greedy. Scaling the noise, not the logits, can't overflow. The
// noise comes from word v % 4 of Philox4x32-10 with the row's seed as key and the counter
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
// Work: a cluster of CLUSTER blocks a row, which deal out its tiles of 4 * THREADS logits in turn. Each
// copies its logits to shared memory once (STAGED) and goes through them as often as needed. Noise
// is bounded first: logarithms are computed only for what may beat the warp's best, random words
// only where a group of logits may.
//   Few may be left: the j-th largest of the threads' maxima, k <= j * CLUSTER, bounds the k-th
//   largest from below in each block, so also the least of these; min_p bounds by the best. What
//   reaches the bound goes to the first block, which ranks it, sums it and draws from it alone.
//   Else the k-th largest is found bit by bit, and no threshold is searched for top_p: if too much
//   lies above the winner, it is not left, and nor is anything below it: the winner among those
//   above is next.
// Bound: S * vocab * 4 bytes read, once.
#include "cluster.cuh"
#include "logits.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "reduce.cuh"
#include "row_params.cuh"
#include "token_weight.cuh"

constexpr int kMaxKept = 512;
// top_p alone: what weighs less than 2^-kDepth of the best is hoped to lie outside of it.
constexpr float kDepth = 10.0f;

// A logit that may be left.
struct alignas(16) Kept {
  u64 weight;
  u32 key;
  i32 index;
};

// Sums of weights: of all logits left by min_p and top_k, and of those of them above the winner.
struct Sums {
  u64 all, above;
};

// A block's weights: of all that min_p leaves (with top_p alone), of those kept, and their number.
struct alignas(8) Share {
  u64 all, kept;
  i32 count;
};

struct alignas(16) Shared {
  union {
    u32 maxima[1024];     // of the threads
    Kept kept[kMaxKept];  // in the first block: a part for each block
  };
  Share shares[kMaxCluster];
  union {
    Candidate candidates[kMaxWarps];
    Sums sums[kMaxWarps];
    u32 keys[kMaxWarps];
  };
  union Message {  // from each block; they take turns
    Candidate candidates[kMaxCluster];
    Sums sums[kMaxCluster];
    uint2 keys[kMaxCluster];
  } messages[2];
  i32 num_kept;
};
static_assert(sizeof(Shared) == 9168, "SHARED_BYTES in tinyvllm/ops/sample.py");

// One block's share of a row, and how it talks to the others.
template <bool ALIGNED, int THREADS, int CLUSTER, bool STAGED> struct Part {
  static constexpr int kThreads = THREADS, kWarps = THREADS / kWarpSize, kBlocks = CLUSTER;
  static constexpr int kTile = 4 * THREADS, kStride = CLUSTER * kTile;
  Shared& shared;
  const float* row;  // in global memory
  float* staged;     // tiles of the row one after the other, NaN behind its end
  i32 begin, vocab;  // of this thread's first four logits
  int turn;

  // Calls f(four logits, the first one's index) for all of the part, all threads of a warp at once;
  // behind the row come NaN.
  template <int UNROLL = 1, typename F> __device__ __forceinline__ void for_each(F f) const {
    const i32 last = vocab - 1 + begin;  // as many for all
    if constexpr (STAGED) {
      const float* x = staged + threadIdx.x * 4;
#pragma unroll UNROLL
      for (i32 i = begin; i <= last; i += kStride, x += kTile) {
        f(*reinterpret_cast<const Vec<float, 4>*>(x), i);
      }
    } else {
      Vec<float, 4> next = load(begin);
#pragma unroll 1
      for (i32 i = begin; i <= last; i += kStride) {
        const Vec<float, 4> values = next;
        next = load(i + kStride);
        f(values, i);
      }
    }
  }

  __device__ __forceinline__ Vec<float, 4> load(i32 i) const {
    return load_logits<ALIGNED>(row, i, vocab);
  }

  // Begins to copy the part to shared memory.
  __device__ __forceinline__ void stage() const {
    const i32 last = vocab - 1 + begin;
    float* x = staged + threadIdx.x * 4;
#pragma unroll 4
    for (i32 i = begin; i <= last; i += kStride, x += kTile) {
      if (ALIGNED && i < vocab) {
        cp_async_16(smem_address(x), row + i);
      } else {
        *reinterpret_cast<Vec<float, 4>*>(x) = load(i);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void sync() const {
    if constexpr (CLUSTER > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // What the blocks say, one value each, combined in every thread. combine(x of this lane) is a
  // reduction over a warp in which lane i has the value of block i, and the others `none`.
  template <typename T, typename Combine>
  __device__ __forceinline__ T exchange(T mine, T none, T (Shared::Message::*field)[kMaxCluster],
                                        Combine combine) {
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < CLUSTER) {
      (at_rank(&shared, lane)->messages[turn].*field)[blockIdx.x] = mine;
    }
    sync();
    const T value = lane < CLUSTER ? (shared.messages[turn].*field)[lane] : none;
    turn ^= 1;
    return combine(value);
  }
};

__device__ __forceinline__ u32 warp_max_key(u32 x) { return __reduce_max_sync(kFullMask, x); }
__device__ __forceinline__ u32 warp_min_key(u32 x) { return __reduce_min_sync(kFullMask, x); }

__device__ __forceinline__ u64 warp_sum_u64(u64 x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kFullMask, x, offset);
  }
  return x;
}

__device__ __forceinline__ Sums warp_sums(Sums x) {
  return {warp_sum_u64(x.all), warp_sum_u64(x.above)};
}

// A warp's reduction, over the block; the rules of block_sum in reduce.cuh.
template <typename T, typename Combine>
__device__ __forceinline__ T over_block(T x, T none, T* scratch, Combine combine) {
  const int lane = threadIdx.x % kWarpSize;
  x = combine(x);
  __syncthreads();
  if (lane == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return combine(lane < blockDim.x / kWarpSize ? scratch[lane] : none);
}

__device__ __forceinline__ float largest(const Vec<float, 4>& x) {
  return fmaxf(fmaxf(x.v[0], x.v[1]), fmaxf(x.v[2], x.v[3]));
}

__host__ __device__ constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

// A lower bound of the k-th largest of n keys in shared memory, in every thread: the largest number
// with its last kShift bits 0 that at least k of them reach. Each warp tries another value of the
// next bits.
template <int kWarps, int kShift>
__device__ __forceinline__ u32 kth_largest(const u32* keys, int n, int k) {
  constexpr int kBits = log2_of(kWarps);
  const int lane = threadIdx.x % kWarpSize, step = threadIdx.x / kWarpSize + 1;
  u32 found = 0;
#pragma unroll 1
  for (int shift = 32 - kBits;; shift = max(shift - kBits, kShift)) {
    const u32 tried = found + (static_cast<u32>(step) << shift);
    int count = 0;
    if (step < kWarps) {
#pragma unroll 4
      for (int i = lane; i < n; i += kWarpSize) count += keys[i] >= tried;
      count = warp_sum(count);
    }
    found += static_cast<u32>(__syncthreads_count(lane == 0 && step < kWarps && count >= k))
             << shift;
    if (shift == kShift) return found;
  }
}

// The key of the k-th largest logit of the row, or one that all reach if there are fewer.
template <typename PartT> __device__ __forceinline__ u32 kth_of_row(PartT& part, int k) {
  u32 found = 0;
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 2) {
    float at_least[3];
#pragma unroll
    for (u32 i = 0; i < 3; ++i) at_least[i] = value_of(found + ((i + 1) << shift));
    i32 counts[3] = {};
    part.template for_each<2>([&](const Vec<float, 4>& values, i32) {
#pragma unroll
      for (int i = 0; i < 12; ++i) counts[i / 4] += values.v[i % 4] >= at_least[i / 4];
    });
    Sums sums = {static_cast<u64>(counts[0]) | static_cast<u64>(counts[1]) << 32,
                 static_cast<u64>(counts[2])};
    sums = over_block(sums, Sums{0, 0}, part.shared.sums, warp_sums);
    sums = part.exchange(sums, Sums{0, 0}, &Shared::Message::sums, warp_sums);
    const u32 step = (static_cast<u32>(sums.all) >= k) + (sums.all >> 32 >= k) + (sums.above >= k);
    found += step << shift;
  }
  return found;
}

// The best logit with noise of those from `lowest` up that weigh at least `floor`.
template <typename PartT, typename Weigh>
__device__ __forceinline__ Candidate winner(PartT& part, float lowest, float temperature,
                                            uint2 seed, u32 position, u64 floor, Weigh weight) {
  // With noise a logit is at most logit + most - spread * log2 of its word: ln 2, and a little.
  const float spread = temperature * 0.693155f, most = spread * 32.0001f;
  const PhiloxKeys keys = philox_keys(seed);
  Candidate best = no_candidate();
  float reach = lowest;          // a smaller logit can't win
  float bar = -CUDART_INF_F;     // nor one that is at most this + most
  part.for_each([&](const Vec<float, 4>& values, u32 index) {
    if (!__any_sync(kFullMask, largest(values) >= reach)) return;
    u32 word[4] = {};
    Vec<float, 4> bound = values;
    if (temperature > 0.0f) {
      const uint4 words = philox4x32(make_uint4(index / 4, position, 0, 0), keys);
      word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) bound.v[i] = fmaf(-spread, log2_of_word(word[i]), bound.v[i]);
      if (!__any_sync(kFullMask, largest(bound) >= bar)) return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(values.v[i] >= lowest && bound.v[i] >= bar)) continue;
      float value = values.v[i];
      if (temperature > 0.0f) {
        value = __fadd_rn(value, __fmul_rn(temperature, gumbel(word[i])));
      }
      const Candidate candidate{value, static_cast<i32>(index) + i};
      if (before(candidate, best) && (floor == 0 || weight(values.v[i]) >= floor)) {
        best = candidate;
      }
    }
    bar = warp_max(best.value);
    reach = fmaxf(lowest, __fmaf_rd(-kMaxGumbel, temperature, bar));
    // Rounded down, and by more than the roundings of the bound and of the sum.
    if (temperature > 0.0f) bar = __fmaf_rd(fabsf(bar), -0x1p-22f, __fsub_rd(bar, most));
  });
  best = over_block(best, no_candidate(), part.shared.candidates, warp_best);
  return part.exchange(best, no_candidate(), &Shared::Message::candidates, warp_best);
}

// The least logit that may weigh floor_log2 octaves below the best, or a little less.
__device__ __forceinline__ float bound_of(float best, float scale, float floor_log2) {
  return __fadd_rd(best, __fdiv_rd(floor_log2 - 0.01f, scale));
}

// Draws from the n logits kept in this block: of those the k largest, and of these what top_p leaves,
// whose target is 0 if it is for those k.
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

template <bool ALIGNED, bool FILTERED, int THREADS, int CLUSTER, bool STAGED>
__global__ void __launch_bounds__(THREADS, CLUSTER > 1 && THREADS <= 256 ? 3 : 1)
    sample_kernel(const float* logits, const i32* sample_slots, const i32* sample_positions,
                  const RowParams* row_params, i32* tokens, i32 vocab) {
  start_next();
  wait_for_previous();
  extern __shared__ __align__(16) unsigned char smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  float* staged = reinterpret_cast<float*>(smem + sizeof(Shared));
  const i64 s = blockIdx.y;
  Part<ALIGNED, THREADS, CLUSTER, STAGED> part{
      shared, logits + s * vocab, staged, static_cast<i32>(blockIdx.x * THREADS + threadIdx.x) * 4,
      vocab,  0};
  if constexpr (STAGED) part.stage();
  if (threadIdx.x == 0) shared.num_kept = 0;
  part.sync();  // all blocks of the cluster run, so that their shared memory may be written
  const i32 slot = sample_slots[s];
  if (slot < 0) {  // in all blocks of the cluster
    if (STAGED) cp_async_wait<0>();
    if (blockIdx.x == 0 && threadIdx.x == 0) tokens[s] = 0;
    return;
  }
  const RowParams params = row_params[slot];
  const float temperature = params.temperature;
  const uint2 seed = make_uint2(params.seed[0], params.seed[1]);
  const u32 position = sample_positions[s];
  if constexpr (STAGED) {
    cp_async_wait<0>();
    __syncthreads();
  }

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
