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
// Work: a cluster of CLUSTER blocks a row, each with `chunk` neighbouring logits (a multiple of 4),
// which it copies to shared memory once (STAGED) and goes through as often as needed: for the best,
// the k-th largest, the winner, and with top_p the sums. Noise is bounded first: logarithms are
// computed only for what may beat the warp's best, random words only where a group of logits may.
//   k-th largest: the j-th largest of the threads' maxima, k <= j * CLUSTER, bounds it from below
//   in each block, so also the least of these; what reaches that goes to the first block.
//   top_p: no threshold is searched. If too much lies above the winner, it is not left, and nor is
//   anything below it: the winner among those above is next.
// Bound: S * vocab * 4 bytes read, once.
#include "cluster.cuh"
#include "logits.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "reduce.cuh"
#include "row_params.cuh"
#include "token_weight.cuh"

constexpr int kMaxKept = 2048;

// Weights of the logits left by min_p and top_k, and of those of them above the winner.
struct Sums {
  u64 all, above;
};

struct alignas(16) Shared {
  u32 kept[kMaxKept];  // keys of logits among which the k-th largest is
  int num_kept;
  union {
    Candidate candidates[kMaxWarps];
    Sums sums[kMaxWarps];
    u32 keys[kMaxWarps];
  };
  union Message {  // of one block to the others; they take turns
    Candidate candidate;
    Sums sums;
    u32 key;
  } message[2];
};
static_assert(sizeof(Shared) == 8752, "SHARED_BYTES in tinyvllm/ops/sample.py");

// Places for a part's logits: as many for each thread.
__device__ __forceinline__ i32 padded(i32 chunk, int threads) {
  return ceil_div(chunk, threads * 4) * threads * 4;
}

// One block's share of a row, and how it talks to the others.
template <bool ALIGNED, int THREADS, int CLUSTER, bool STAGED> struct Part {
  static constexpr int kThreads = THREADS, kWarps = THREADS / kWarpSize, kBlocks = CLUSTER;
  Shared& shared;
  const float* row;     // in global memory
  const float* staged;  // logits begin ... begin + chunk of it, then NaN
  i32 begin, chunk, vocab;
  int turn;

  // Calls f(four logits, the first one's index) for all of the part, all threads of a warp at once;
  // behind the part come NaN.
  template <typename F> __device__ __forceinline__ void for_each(F f) const {
    i32 i = threadIdx.x * 4;
    if constexpr (STAGED) {
#pragma unroll 1
      for (; i < padded(chunk, THREADS); i += THREADS * 4) {
        f(*reinterpret_cast<const Vec<float, 4>*>(staged + i), begin + i);
      }
    } else {
      Vec<float, 4> next = load(i);
#pragma unroll 1
      for (; i < padded(chunk, THREADS); i += THREADS * 4) {
        const Vec<float, 4> values = next;
        next = load(i + THREADS * 4);
        f(values, begin + i);
      }
    }
  }

  // Logits i ... i + 3 of the part, from global memory.
  __device__ __forceinline__ Vec<float, 4> load(i32 i) const {
    return load_logits<ALIGNED>(row, i < chunk ? begin + i : vocab, vocab);
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
  __device__ __forceinline__ T exchange(T mine, T none, T Shared::Message::*field,
                                        Combine combine) {
    if (threadIdx.x == 0) shared.message[turn].*field = mine;
    sync();
    const int lane = threadIdx.x % kWarpSize;
    T value = none;
    if (lane < CLUSTER) value = at_rank(&shared, lane)->message[turn].*field;
    turn ^= 1;
    return combine(value);
  }
};

__device__ __forceinline__ u32 warp_max_key(u32 x) { return __reduce_max_sync(kFullMask, x); }
__device__ __forceinline__ u32 warp_min_key(u32 x) { return __reduce_min_sync(kFullMask, x); }

__device__ __forceinline__ Sums warp_sums(Sums x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x.all += __shfl_xor_sync(kFullMask, x.all, offset);
    x.above += __shfl_xor_sync(kFullMask, x.above, offset);
  }
  return x;
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

// The k-th largest of n keys in shared memory, in every thread: the largest number that at least k
// of them reach, and so 0 if n < k. Only its bits from `last_shift` up are found, the rest is 0.
// Each warp tries another value of the next bits.
template <int kWarps>
__device__ __forceinline__ u32 kth_largest(const u32* keys, int n, int k, int last_shift) {
  constexpr int kBits = log2_of(kWarps);
  const int lane = threadIdx.x % kWarpSize, step = threadIdx.x / kWarpSize + 1;
  u32 found = 0;
#pragma unroll 1
  for (int shift = 32 - kBits;; shift = max(shift - kBits, last_shift)) {
    const u32 tried = found + (static_cast<u32>(step) << shift);
    int count = 0;
    if (step < kWarps) {
      for (int i = lane; i < n; i += kWarpSize) count += keys[i] >= tried;
      count = warp_sum(count);
    }
    found += static_cast<u32>(__syncthreads_count(lane == 0 && step < kWarps && count >= k))
             << shift;
    if (shift == last_shift) return found;
  }
}

// The key of the k-th largest logit of the row, or one that all reach if there are fewer.
// `thread_best` is the largest logit of this thread's.
template <typename PartT>
__device__ __forceinline__ u32 kth_of_row(PartT& part, int k, float thread_best) {
  constexpr int kThreads = PartT::kThreads, kWarps = PartT::kWarps;
  Shared& shared = part.shared;
  shared.kept[threadIdx.x] = key_of(thread_best);
  if (threadIdx.x == 0) shared.num_kept = 0;
  __syncthreads();
  const int j = ceil_div(k, PartT::kBlocks);
  u32 bound = j <= kThreads ? kth_largest<kWarps>(shared.kept, kThreads, j, 14) : 0;
  bound = part.exchange(bound, ~0u, &Shared::Message::key, warp_min_key);
  const float lowest = bound > kLowestKey ? value_of(bound) : -CUDART_INF_F;
  Shared* first = at_rank(&shared, 0);
  part.for_each([&](const Vec<float, 4>& values, i32) {
    if (!__any_sync(kFullMask, largest(values) >= lowest)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 key = key_of(values.v[i]);
      if (!(values.v[i] >= lowest) || key <= kLowestKey) continue;
      const int place = atomicAdd(&first->num_kept, 1);
      if (place < kMaxKept) first->kept[place] = key;
    }
  });
  part.sync();
  u32 found = ~0u;
  if (blockIdx.x == 0 && shared.num_kept <= kMaxKept) {
    found = kth_largest<kWarps>(shared.kept, shared.num_kept, k, 0);
  }
  found = part.exchange(found, ~0u, &Shared::Message::key, warp_min_key);
  if (found != ~0u) return found;
  // Too many: equal ones, or a large k. Bit by bit.
  found = 0;
#pragma unroll 1
  for (int shift = 31; shift >= 0; --shift) {
    const u32 tried = found | 1u << shift;
    const float at_least = value_of(tried);
    Sums count = {0, 0};
    part.for_each([&](const Vec<float, 4>& values, i32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) count.all += values.v[i] >= at_least;
    });
    count = over_block(count, Sums{0, 0}, shared.sums, warp_sums);
    count = part.exchange(count, Sums{0, 0}, &Shared::Message::sums, warp_sums);
    if (count.all >= k) found = tried;
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
  return part.exchange(best, no_candidate(), &Shared::Message::candidate, warp_best);
}

template <bool ALIGNED, bool FILTERED, int THREADS, int CLUSTER, bool STAGED>
__global__ void __launch_bounds__(THREADS, CLUSTER > 1 ? 3 : 1)
    sample_kernel(const float* logits, const i32* sample_slots, const i32* sample_positions,
                  const RowParams* row_params, i32* tokens, i32 vocab, i32 chunk) {
  start_next();
  wait_for_previous();
  extern __shared__ __align__(16) unsigned char smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  float* staged = reinterpret_cast<float*>(smem + sizeof(Shared));
  const i64 s = blockIdx.y;
  const i32 begin = blockIdx.x * chunk;
  Part<ALIGNED, THREADS, CLUSTER, STAGED> part{shared, logits + s * vocab, staged, begin, chunk, vocab, 0};
  if constexpr (STAGED) {
    const i32 whole = ALIGNED ? min(chunk, max(0, vocab - begin)) : 0;
#pragma unroll 4
    for (i32 i = threadIdx.x * 4; i < whole; i += THREADS * 4) {
      cp_async_16(smem_address(staged + i), part.row + begin + i);
    }
#pragma unroll 4
    for (i32 i = whole + threadIdx.x * 4; i < padded(chunk, THREADS); i += THREADS * 4) {
      *reinterpret_cast<Vec<float, 4>*>(staged + i) = part.load(i);
    }
    cp_async_commit();
  }
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
  const float p = params.top_p;
  float lowest = -CUDART_INF_F;
  u64 floor = 0;
  float best = CUDART_NAN_F;
  bool filter = FILTERED && temperature > 0.0f && (k > 0 || p < 1.0f || params.min_p > 0.0f);
  if (FILTERED && filter) {
    float mine = -CUDART_INF_F;
    part.for_each([&](const Vec<float, 4>& values, i32) { mine = fmaxf(mine, largest(values)); });
    u32 best_key = over_block(key_of(mine), 0u, shared.keys, warp_max_key);
    best_key = part.exchange(best_key, 0u, &Shared::Message::key, warp_max_key);
    best = value_of(best_key);
    filter = best_key > kLowestKey;
    if (filter && k > 0) {
      const u32 kth = kth_of_row(part, k, mine);
      if (kth > kLowestKey) lowest = value_of(kth);
    }
    if (params.min_p > 0.0f) floor = __double2ull_ru(static_cast<double>(params.min_p) * 0x1p40);
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
  part.sync();  // a block's shared memory lives while others read it
}
