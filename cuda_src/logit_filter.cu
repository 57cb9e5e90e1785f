// min_logit[s] = the smallest logit of row s that min_p, top_k and top_p leave, each of the rest:
//
//   min_p   logits whose weight is at least min_p times that of the best
//   top_k   of these the k largest
//   top_p   of these the largest ones until they have top_p of the weight of all of these
//
// Those equal to the last one that is left stay too. -infinity where nothing is filtered (greedy
// rows, rows with all three off, padding rows with slot -1, rows with no number above -infinity).
//
// The weight exp((x - best) / temperature) is an integer in units of 2^-40, and each float32
// operation towards it is rounded as in tinyvllm/ops/logit_filter.py: sums do not depend on their
// order, and the results are those of the reference to the bit. Weights below 2^-41 are 0.
//
// logits [S, vocab] float32 contiguous; min_logit [S]; parameters by slot (row_params.cuh).
//
// Work: one block a row. Logits become keys, integers of the same order. A threshold's key is found
// 11 bits at a time: a histogram over those bits of the keys that agree with the bits before, in
// shared memory, then a scan over its bins from the largest. One pass for the best, one for min_p,
// three each for top_k and top_p; all but the first hit L2. Bound: S * vocab * 4 bytes read, once.
#include "logits.cuh"
#include "reduce.cuh"
#include "row_params.cuh"

constexpr int kThreads = 1024;
constexpr int kBins = 2048;
constexpr u32 kLowestKey = 0x007fffffu;  // of -infinity: only keys above it take part

// NaN becomes the lowest key of all, -0 the key of 0.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return isnan(x) ? 0 : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// Weight of a logit as an integer; see the top of the file.
struct Weight {
  float best, scale;

  __device__ __forceinline__ Weight(float best, float temperature)
      : best(best), scale(fminf(__fdiv_rn(1.44269504088896341f, temperature), 1e30f)) {}

  __device__ __forceinline__ u64 operator()(u32 key) const {
    const float x = value_of(key);
    const float exponent = x == best ? 0.0f : __fmul_rn(__fsub_rn(x, best), scale);
    if (!(exponent >= -41.0f)) return 0;
    const float whole = rintf(exponent), part = __fsub_rn(exponent, whole);
    // (part ln 2)^i / i!: the coefficients of POLYNOMIAL in logit_filter.py.
    float power = 1.525273365e-05f;
    power = __fadd_rn(__fmul_rn(power, part), 1.540352969e-04f);
    power = __fadd_rn(__fmul_rn(power, part), 1.333355787e-03f);
    power = __fadd_rn(__fmul_rn(power, part), 9.618128650e-03f);
    power = __fadd_rn(__fmul_rn(power, part), 5.550410971e-02f);
    power = __fadd_rn(__fmul_rn(power, part), 2.402265072e-01f);
    power = __fadd_rn(__fmul_rn(power, part), 6.931471825e-01f);
    power = __fadd_rn(__fmul_rn(power, part), 1.0f);
    const u64 fixed = static_cast<u64>(__float2uint_rz(power * 0x1p30f)) << 10;
    return fixed >> static_cast<int>(-whole);
  }
};

// Each logit of the row counts as one.
struct One {
  __device__ __forceinline__ u64 operator()(u32) const { return 1; }
};

struct Shared {
  u32 low[kBins], high[kBins];  // words of the histogram's sums
  u64 warp_sums[kThreads / kWarpSize];
  u32 bin;    // where the target lies
  u64 above;  // sum of the bins above it
};

// Calls f(key) for each logit of the row above -infinity.
template <bool ALIGNED, typename F>
__device__ __forceinline__ void for_each_key(const float* row, i32 vocab, F f) {
  for (i32 first = threadIdx.x * 4; first < vocab; first += kThreads * 4) {
    const Vec<float, 4> values = load_logits<ALIGNED>(row, first, vocab);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 key = key_of(values.v[i]);
      if (key > kLowestKey) f(key);
    }
  }
}

// Largest over the block, in every thread.
__device__ __forceinline__ u32 block_max(u32 x, u32* scratch) {
  x = __reduce_max_sync(kFullMask, x);
  __syncthreads();  // the previous call's values have been read
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return __reduce_max_sync(kFullMask, scratch[threadIdx.x % kWarpSize]);
}

// Sum of x over this and all earlier threads.
__device__ __forceinline__ u64 block_scan(u64 x, u64* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const u64 before = __shfl_up_sync(kFullMask, x, offset);
    if (lane >= offset) x += before;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; ++w) x += warp_sums[w];
  return x;
}

// The key t of a logit such that the keys above t weigh less than the target, and together with
// those equal to t at least as much. Only keys from `lowest` up count. target(total) makes the
// target of the weight of all of them; a target of 0 stands for all, and gives `lowest`.
template <bool ALIGNED, typename Weigh, typename Target>
__device__ u32 threshold(const float* row, i32 vocab, u32 lowest, Weigh weigh, Target target,
                         Shared& shared) {
  u32 key_bits = 0, known = 0;  // the bits of t found so far, and which these are
  u64 wanted = 0;
  __syncthreads();  // what used the shared memory before is done
#pragma unroll 1
  for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
    for (int b = threadIdx.x; b < kBins; b += kThreads) shared.low[b] = shared.high[b] = 0;
    __syncthreads();
    for_each_key<ALIGNED>(row, vocab, [&](u32 key) {
      if (key < lowest || (key & known) != key_bits) return;
      const u64 weight = weigh(key);
      if (weight == 0) return;
      const int bin = key >> shift & (kBins - 1);
      const u32 word = static_cast<u32>(weight);
      const u32 before = atomicAdd(&shared.low[bin], word);
      const u32 carried = static_cast<u32>(weight >> 32) + (before + word < before);
      if (carried) atomicAdd(&shared.high[bin], carried);
    });
    __syncthreads();
    // Thread t has the bins 2t and 2t + 1 counted from the largest.
    u64 sum[2];
    const int top = kBins - 1 - 2 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = static_cast<u64>(shared.high[top - i]) << 32 | shared.low[top - i];
    }
    const u64 upto = block_scan(sum[0] + sum[1], shared.warp_sums);
    if (shift == 21) {
      u64 total = 0;
      for (int w = 0; w < kThreads / kWarpSize; ++w) total += shared.warp_sums[w];
      wanted = target(total);
      if (wanted == 0) return lowest;  // the same in all threads
    }
    const u64 before = upto - sum[0] - sum[1];
    if (before < wanted && wanted <= upto) {  // one thread
      const bool second = before + sum[0] < wanted;
      shared.bin = top - second;
      shared.above = before + (second ? sum[0] : 0);
    }
    __syncthreads();
    // In the last round one bit of the bin is known already; it is the same.
    key_bits |= shared.bin << shift;
    known = 0xffffffffu << shift;
    wanted -= shared.above;
  }
  return key_bits;
}

template <bool ALIGNED>
__global__ void __launch_bounds__(kThreads)
    filter_logits_kernel(const float* logits, const i32* sample_slots, const RowParams* row_params,
                         float* min_logit, i32 vocab) {
  start_next();
  wait_for_previous();
  __shared__ Shared shared;
  const i64 s = blockIdx.x;
  const float* row = logits + s * vocab;
  const i32 slot = sample_slots[s];
  RowParams params;
  bool off = slot < 0;
  if (!off) {
    params = row_params[slot];
    off = params.temperature == 0.0f ||
          (params.top_k == 0 && params.top_p >= 1.0f && params.min_p <= 0.0f);
  }
  u32 best = 0;
  if (!off) {
    for_each_key<ALIGNED>(row, vocab, [&](u32 key) { best = max(best, key); });
    best = block_max(best, shared.low);
    off = best == 0;
  }
  if (off) {
    if (threadIdx.x == 0) min_logit[s] = -CUDART_INF_F;
    return;
  }

  const Weight weight(value_of(best), params.temperature);
  u32 lowest = kLowestKey;
  if (params.min_p > 0.0f) {
    const u64 floor = __double2ull_ru(static_cast<double>(params.min_p) * 0x1p40);
    u32 smallest = best;
    for_each_key<ALIGNED>(row, vocab, [&](u32 key) {
      if (weight(key) >= floor) smallest = min(smallest, key);
    });
    lowest = ~block_max(~smallest, shared.low);
  }
  if (params.top_k > 0) {
    const u64 k = params.top_k;
    auto target = [=](u64 total) { return k < total ? k : 0; };
    lowest = threshold<ALIGNED>(row, vocab, lowest, One(), target, shared);
  }
  if (params.top_p < 1.0f) {
    const double p = params.top_p;
    auto target = [=](u64 total) { return __double2ull_ru(p * __ull2double_rn(total)); };
    lowest = threshold<ALIGNED>(row, vocab, lowest, weight, target, shared);
  }
  if (threadIdx.x == 0) min_logit[s] = value_of(lowest);
}
