// Attention of one new token per row over its paged context, split over the context:
//   y[row, head] = sum_p softmax_p(scale * q[row, head] . k[p]) v[p],  p = 0 .. seq_len - 1
//
// q, y [rows, num_heads * HEAD_DIM] with a row stride; the cache as in paged_kv.cuh. Query heads
// kv_head * group_size + 0..group_size-1 read KV head kv_head.
//
// A context is cut into at most kMaxPartitions partitions whose length depends on that context
// alone, so a row's result is the same to the bit whichever rows share its batch and however many
// blocks there are. Block (x, y, z) computes, of row z, up to HEADS query heads of one KV head (so
// K and V are read once for all of them) for partitions x, x + gridDim.x, ... With one block for
// all partitions it merges them itself; with more, each partition's state goes to scratch and
// attention_merge_kernel merges them in the same order.
//
// In a block, HEAD_DIM / 8 lanes hold one token (16 bytes each), and a thread has kUnroll tokens'
// K and V in flight; every lane group keeps a softmax state of its own until the partition's end.
//
// A row of length 0 is padding: its output is 0, and its slot is not looked at.
//
// Bytes: K and V once, 2 * seq_len * HEAD_DIM * 2 per KV head. Bound: memory.
#include "mma.cuh"
#include "paged_kv.cuh"
#include "softmax_state.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMinPartition = 128;  // tokens; as in tinyvllm/ops/attention.py
constexpr int kMaxPartitions = 64;

// Tokens per partition of a context: the same for every kernel that computes or merges it.
__device__ __forceinline__ int partition_length(int length) {
  int n = kMinPartition;
  while (n * kMaxPartitions < length) n *= 2;
  return n;
}

// 16 bytes that are read once (kept out of L1), or zeros without a read where not `valid`. A
// predicate, not a branch: a thread's loads all go out before the first one is waited for.
__device__ __forceinline__ uint4 load_once(const void* p, bool valid) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{ .reg .pred valid; setp.ne.s32 valid, %5, 0;\n\t"
      "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(static_cast<int>(valid)));
  return v;
}

template <typename T> __device__ __forceinline__ void unpack8(float (&x)[8], const uint4& bits) {
  const float2 a = unpack2<T>(bits.x), b = unpack2<T>(bits.y);
  const float2 c = unpack2<T>(bits.z), d = unpack2<T>(bits.w);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

template <typename T, int HEAD_DIM, int HEADS>
__global__ void __launch_bounds__(kThreads)
    attention_decode_kernel(const T* q, const T* kv_cache, const i32* block_tables,
                            const i32* batch_slots, const i32* seq_lens, T* y, float* partial_out,
                            SoftmaxState* partial_state, float scale_log2, int q_stride,
                            int y_stride, i64 block_stride, int num_kv_heads, int group_size,
                            int block_shift, int max_blocks, int max_partitions) {
  constexpr int kLanes = HEAD_DIM / 8;             // lanes of one token
  constexpr int kTokens = kThreads / kLanes;       // tokens that the block loads at once
  constexpr int kUnroll = HEADS > 4 ? 4 : 8;       // times that, before any of it is used
  constexpr int kOutputs = HEADS * HEAD_DIM;
  static_assert(kMinPartition % (kTokens * kUnroll) == 0, "partitions are whole iterations");

  __shared__ float warp_out[kWarps][kOutputs];
  __shared__ SoftmaxState warp_state[kWarps][HEADS];
  // Merged over this block's partitions; each entry is touched by one thread only.
  struct Total {
    SoftmaxState state;
    float out;
  };
  __shared__ Total total[kOutputs];

  const int row = blockIdx.z;
  const int chunks = ceil_div(group_size, HEADS);
  const int kv_head = blockIdx.y / chunks;
  const int first_in_group = blockIdx.y % chunks * HEADS;
  const int heads = min(HEADS, group_size - first_in_group);  // the last chunk may be partial
  const int head0 = kv_head * group_size + first_in_group;
  const int num_heads = num_kv_heads * group_size;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int dim = threadIdx.x % kLanes * 8, token = threadIdx.x / kLanes;

  const int length = seq_lens[row];
  const int part_length = partition_length(length);
  const int parts = ceil_div(length, part_length);
  const bool alone = gridDim.x == 1;
  T* row_out = y + static_cast<i64>(row) * y_stride + head0 * HEAD_DIM;
  if (length == 0 && alone) {
    for (int e = threadIdx.x; e < heads * HEAD_DIM; e += kThreads) row_out[e] = from_float<T>(0.0f);
  }
  if (static_cast<int>(blockIdx.x) >= parts) return;

  const PagedKv<const T> kv(kv_cache, block_stride, num_kv_heads, kv_head, block_tables,
                            max_blocks, batch_slots[row], block_shift, HEAD_DIM);

  // A head beyond a partial chunk repeats the last one; its result is not stored.
  float query[HEADS][8];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const int head = head0 + min(h, heads - 1);
    const T* p = q + static_cast<i64>(row) * q_stride + head * HEAD_DIM + dim;
    unpack8<T>(query[h], *reinterpret_cast<const uint4*>(p));
#pragma unroll
    for (int i = 0; i < 8; i++) query[h][i] *= scale_log2;
  }
  for (int e = threadIdx.x; e < kOutputs; e += kThreads) total[e] = {SoftmaxState::empty(), 0.0f};

  for (int part = blockIdx.x; part < parts; part += gridDim.x) {
    const int begin = part * part_length, end = min(begin + part_length, length);
    SoftmaxState state[HEADS];
    float out[HEADS][8] = {};
#pragma unroll
    for (int h = 0; h < HEADS; h++) state[h] = SoftmaxState::empty();

    for (int base = begin; base < end; base += kTokens * kUnroll) {
      // Tokens beyond the end are not read: their blocks may not exist, their memory hold NaN.
      int block[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        block[u] = kv.block(min(base + u * kTokens + token, end - 1));
      }
      uint4 keys[kUnroll], values[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        const int position = base + u * kTokens + token;
        const T* key = kv.key(block[u], position) + dim;
        keys[u] = load_once(key, position < end);
        values[u] = load_once(key + kv.v_offset, position < end);
      }
      float weight[HEADS][kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        float k[8];
        unpack8<T>(k, keys[u]);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
          float dot = query[h][0] * k[0];
#pragma unroll
          for (int i = 1; i < 8; i++) dot = fmaf(query[h][i], k[i], dot);
#pragma unroll
          for (int offset = kLanes / 2; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(kFullMask, dot, offset);
          }
          weight[h][u] = base + u * kTokens + token < end ? dot : kNegInf;
        }
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float new_max = state[h].max;
#pragma unroll
        for (int u = 0; u < kUnroll; u++) new_max = fmaxf(new_max, weight[h][u]);
        const float reference = finite_max(new_max);
        const float keep = exp2_fast(state[h].max - reference);
        state[h].max = new_max;
        state[h].sum *= keep;
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
          weight[h][u] = exp2_fast(weight[h][u] - reference);
          state[h].sum += weight[h][u];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) out[h][i] *= keep;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        float v[8];
        unpack8<T>(v, values[u]);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
          for (int i = 0; i < 8; i++) out[h][i] = fmaf(weight[h][u], v[i], out[h][i]);
        }
      }
    }

    // Merge the lane groups of a warp, then the warps.
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
      for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
        const MergeWeights w =
            state[h].merge({__shfl_xor_sync(kFullMask, state[h].max, offset),
                            __shfl_xor_sync(kFullMask, state[h].sum, offset)});
#pragma unroll
        for (int i = 0; i < 8; i++) {
          out[h][i] = merge_output(out[h][i], __shfl_xor_sync(kFullMask, out[h][i], offset), w);
        }
      }
      if (lane < kLanes) {
#pragma unroll
        for (int i = 0; i < 8; i++) warp_out[warp][h * HEAD_DIM + dim + i] = out[h][i];
        if (lane == 0) warp_state[warp][h] = state[h];
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < kOutputs; e += kThreads) {
      const int h = e / HEAD_DIM, d = e % HEAD_DIM;
      SoftmaxState merged = warp_state[0][h];
      float sum = warp_out[0][e];
#pragma unroll
      for (int w = 1; w < kWarps; w++) {
        sum = merge_output(sum, warp_out[w][e], merged.merge(warp_state[w][h]));
      }
      if (alone) {
        const MergeWeights w = total[e].state.merge(merged);
        total[e].out = merge_output(total[e].out, sum, w);
      } else if (h < heads) {
        const i64 place = (static_cast<i64>(row) * num_heads + head0 + h) * max_partitions + part;
        partial_out[place * HEAD_DIM + d] = sum;
        if (d == 0) partial_state[place] = merged;
      }
    }
    __syncthreads();  // before the next partition overwrites what the warps left
  }

  if (!alone) return;
  for (int e = threadIdx.x; e < heads * HEAD_DIM; e += kThreads) {
    row_out[e] = from_float<T>(total[e].out / total[e].state.sum);
  }
}

// Merges the partitions' states [rows, num_heads, max_partitions] in order of the context.
// Block (head, row), one thread a dimension.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(HEAD_DIM)
    attention_merge_kernel(const float* __restrict__ partial_out,
                           const SoftmaxState* __restrict__ partial_state,
                           const i32* __restrict__ seq_lens, T* __restrict__ y, int y_stride,
                           int max_partitions) {
  const int head = blockIdx.x, row = blockIdx.y, dim = threadIdx.x;
  const int length = seq_lens[row];
  const int parts = ceil_div(length, partition_length(length));
  const i64 first = (static_cast<i64>(row) * gridDim.x + head) * max_partitions;
  SoftmaxState state = SoftmaxState::empty();
  float out = 0.0f;
#pragma unroll 8
  for (int part = 0; part < parts; part++) {
    const MergeWeights w = state.merge(partial_state[first + part]);
    out = merge_output(out, partial_out[(first + part) * HEAD_DIM + dim], w);
  }
  y[static_cast<i64>(row) * y_stride + head * HEAD_DIM + dim] =
      from_float<T>(parts == 0 ? 0.0f : out / state.sum);
}
