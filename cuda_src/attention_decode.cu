// Attention of one new token per row over its paged context, split over the context:
//   y[row, head] = sum_p softmax_p(scale * q[row, head] . k[p]) v[p],  p = 0 .. seq_len - 1
//
// q, y [rows, num_heads * HEAD_DIM] with a row stride; the cache as in paged_kv.cuh. Query heads
// kv_head * group_size + 0..group_size-1 read KV head kv_head.
//
// A context is cut into at most kMaxPartitions partitions whose length depends on that context
// alone. Block (x, y, z) computes, of row z, up to kHeads query heads of one KV head for partitions
// x, x + n, ..., where n is gridDim.x or, if that is less, the row's number of partitions. If n is
// 1, the block merges its partitions as it goes. Otherwise their states go to scratch, and the
// block that is done last merges them. Either way partitions merge in order of the context, so a
// row's result is the same to the bit whichever rows share its batch and however many blocks there
// are. Launches of one module must not overlap: they share the counters by which the last block
// knows that it is the last.
//
// The warps of a block take tiles of kTile tokens in turn, each through its own ring of tiles in
// shared memory (cp.async), which runs on from partition to partition: no barrier but at a
// partition's end, and up to kRingBytes of each warp in flight. Both products are transposed, so
// that tokens or dimensions are the 16 rows of mma.m16n8k16 and the query heads its 8 columns
// (fewer heads only leave tensor cores idle):
//   S^T [token, head] = K Q^T,  O^T [dim, head] += V^T P^T,
// with K by ldmatrix, V^T by ldmatrix.trans and P^T from S^T, rounded to T, by movmatrix.
//
// A row of length 0 is padding: its output is 0, and its slot is not looked at.
//
// Bytes: K and V once, 2 * seq_len * HEAD_DIM * 2 per KV head (again for each further kHeads query
// heads of it). Bound: memory.
#include "mma.cuh"
#include "paged_kv.cuh"
#include "softmax_state.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMinPartition = 256;  // tokens; as in tinyvllm/ops/attention.py
constexpr int kMaxPartitions = 64;
constexpr int kHeads = 8;         // query heads of a block: columns of an mma
constexpr int kMaxShared = 1024;  // (row, block y) whose context several blocks may share
constexpr int kRingBytes = 16384;  // of a warp
constexpr int kStages = 2;        // tiles in it

// Blocks done with each (row, block y); zero between launches.
__device__ u32 blocks_done[kMaxShared];

// Tokens per partition of a context: a power of two.
__device__ __forceinline__ int partition_length(int length) {
  int n = kMinPartition;
  while (n * kMaxPartitions < length) n *= 2;
  return n;
}

// Transposes an 8x8 matrix of 16-bit elements, (group, 2 pair) and (group, 2 pair + 1) in a lane.
__device__ __forceinline__ u32 transpose_8x8(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// One thread's part of the attention of one head over some of the tokens.
template <int VECS> struct Partial {
  SoftmaxState state = SoftmaxState::empty();
  float4 out[VECS] = {};

  __device__ __forceinline__ void merge(const Partial& other) {
    const MergeWeights w = state.merge(other.state);
#pragma unroll
    for (int v = 0; v < VECS; v++) {
      out[v].x = merge_output(out[v].x, other.out[v].x, w);
      out[v].y = merge_output(out[v].y, other.out[v].y, w);
      out[v].z = merge_output(out[v].z, other.out[v].z, w);
      out[v].w = merge_output(out[v].w, other.out[v].w, w);
    }
  }
};

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(kThreads, HEAD_DIM == 64 ? 3 : 2)
    attention_decode_kernel(const T* q, const T* kv_cache, const i32* block_tables,
                            const i32* batch_slots, const i32* seq_lens, T* y, float* partial_out,
                            SoftmaxState* partial_state, float scale_log2, int q_stride,
                            int y_stride, i64 block_stride, int num_kv_heads, int group_size,
                            int block_shift, int max_blocks, int max_partitions) {
  constexpr int kChunks = HEAD_DIM / 8;           // 16-byte chunks of a token's key
  constexpr int kCopyRows = kWarpSize / kChunks;  // tokens that a warp copies at once
  constexpr int kTileBytes = kRingBytes / kStages / 2;  // of K, and of V
  constexpr int kTile = kTileBytes / (HEAD_DIM * sizeof(T));
  constexpr int kSubtiles = kTile / 16;
  constexpr int kStride = kWarps * kTile;  // tokens from a warp's tile to its next
  constexpr int kSteps = HEAD_DIM / 16;  // mma steps along HEAD_DIM
  constexpr int kVecs = HEAD_DIM / 64;   // float4 of a head's output that a merging thread owns
  constexpr int kPitch = HEAD_DIM + 4;   // the lanes of a fragment hit all banks once
  static_assert(kMinPartition % kStride == 0, "partitions are whole rounds of the warps");

  extern __shared__ __align__(128) unsigned char tiles[];  // [warp][stage][K, V][kTile][HEAD_DIM]
  __shared__ __align__(16) float warp_out[kWarps][kHeads][kPitch];
  __shared__ SoftmaxState warp_state[kWarps][kHeads];
  __shared__ bool is_last;

  start_next();
  wait_for_previous();
  const int row = blockIdx.z;
  const int parts_of_group = ceil_div(group_size, kHeads);
  const int kv_head = blockIdx.y / parts_of_group;
  const int first_in_group = blockIdx.y % parts_of_group * kHeads;
  const int heads = min(kHeads, group_size - first_in_group);
  const int head0 = kv_head * group_size + first_in_group;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int group = lane / 4, pair = lane % 4;
  // As a merging thread:
  const int head = threadIdx.x / 16, dim = threadIdx.x % 16 * 4;  // and dim + 64, ...

  const int length = seq_lens[row], slot = batch_slots[row];
  T* const out_row = y + static_cast<i64>(row) * y_stride + (head0 + head) * HEAD_DIM + dim;
  const auto store = [&](const Partial<kVecs>& p, float factor) {
    if (head >= heads) return;
#pragma unroll
    for (int v = 0; v < kVecs; v++) {
      *reinterpret_cast<uint2*>(out_row + 64 * v) = {
          pack2<T>(p.out[v].x * factor, p.out[v].y * factor),
          pack2<T>(p.out[v].z * factor, p.out[v].w * factor)};
    }
  };
  if (length == 0) {
    if (blockIdx.x == 0) store({}, 0.0f);
    return;
  }
  const int part_length = partition_length(length);
  const int parts = ceil_div(length, part_length);
  const int blocks = min(static_cast<int>(gridDim.x), parts);
  if (static_cast<int>(blockIdx.x) >= blocks) return;

  const PagedKv<const T> kv(kv_cache, block_stride, num_kv_heads, kv_head, block_tables,
                            max_blocks, slot, block_shift, HEAD_DIM);

  // Blocks of each 8 tokens of a tile (block sizes start at 8). Positions beyond the length are
  // never looked up: their blocks may not exist, their memory may hold NaN.
  struct Blocks {
    int of[kTile / 8];
  };
  const auto look_up = [&](int position) {
    Blocks ids;
#pragma unroll
    for (int i = 0; i < kTile / 8; i++) ids.of[i] = kv.block(min(position + 8 * i, length - 1));
    return ids;
  };
  const u32 ring = smem_address(tiles) + warp * kRingBytes;
  const int copy_row = lane / kChunks, copy_chunk = lane % kChunks;
  const auto copy_tile = [&](int stage, int position, const Blocks& ids) {
    if (position < length) {
#pragma unroll
      for (int r = 0; r < kTile; r += kCopyRows) {
        const int eight = position + r / 8 * 8, place = r % 8 + copy_row;
        const bool valid = eight + place < length;  // else zeros: 0 * NaN would be NaN
        const T* key = kv.key(ids.of[r / 8], eight) + place * HEAD_DIM + copy_chunk * 8;
        const u32 dst = ring + stage * 2 * kTileBytes +
                        16 * swizzled_chunk<kChunks>(r + copy_row, copy_chunk);
        cp_async_16(dst, key, valid);
        cp_async_16(dst + kTileBytes, key + kv.v_offset, valid);
      }
    }
    cp_async_commit();  // possibly empty, so that "all but kStages - 1" always means the next tile
  };
  // From a tile of this warp to its next, which may be in this block's next partition.
  const auto next = [&](int position) {
    position += kStride;
    const bool beyond = (position & (part_length - 1)) < kStride;
    return beyond ? position + (blocks - 1) * part_length : position;
  };

  int ahead = blockIdx.x * part_length + warp * kTile;  // the next tile to copy
  Blocks first[kStages];
#pragma unroll
  for (int s = 0, position = ahead; s < kStages; s++, position = next(position)) {
    first[s] = look_up(position);
  }
#pragma unroll
  for (int s = 0; s < kStages; s++, ahead = next(ahead)) copy_tile(s, ahead, first[s]);

  u32 query[kSteps][2] = {};  // columns beyond `heads`: zeros
  if (group < heads) {
    const T* p = q + static_cast<i64>(row) * q_stride + (head0 + group) * HEAD_DIM + 2 * pair;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      query[s][0] = *reinterpret_cast<const u32*>(p + 16 * s);
      query[s][1] = *reinterpret_cast<const u32*>(p + 16 * s + 8);
    }
  }

  Partial<kVecs> total;
  int stage = 0;
  const auto place = [&](int part) {
    const i64 out_head = static_cast<i64>(row) * num_kv_heads * group_size + head0 + head;
    return out_head * max_partitions + part;
  };
  for (int part = blockIdx.x; part < parts; part += blocks) {
    // Of this warp's tiles and this lane's columns, heads 2 pair and 2 pair + 1; `sum` covers this
    // lane's tokens only.
    float out[kSteps][4] = {};
    SoftmaxState state[2] = {SoftmaxState::empty(), SoftmaxState::empty()};

    const int end = min((part + 1) * part_length, length);
    for (int t = part * part_length + warp * kTile; t < end; t += kStride) {
      const Blocks ids = look_up(ahead);
      cp_async_wait<kStages - 1>();
      __syncwarp();
      const u32 k_tile = ring + stage * 2 * kTileBytes, v_tile = k_tile + kTileBytes;

      float score[kSubtiles][4] = {};  // tokens group (0, 1) and group + 8 (2, 3) of each 16
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
#pragma unroll
        for (int u = 0; u < kSubtiles; u++) {
          // Matrices: tokens 0-7 and 8-15 with dimensions 0-7, then with dimensions 8-15 of 16.
          const int r = 16 * u + lane % 16, chunk = 2 * s + lane / 16;
          u32 a[4];
          ldmatrix_x4(a, k_tile + 16 * swizzled_chunk<kChunks>(r, chunk));
          mma_m16n8k16<T>(score[u], a, query[s][0], query[s][1]);
        }
      }
      float keep[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float max = kNegInf;
#pragma unroll
        for (int i = 0; i < 2 * kSubtiles; i++) {
          float& x = score[i / 2][i % 2 * 2 + h];
          x = t + 8 * i + group < length ? x * scale_log2 : kNegInf;
          max = fmaxf(max, x);
        }
#pragma unroll
        for (int offset = 4; offset < kWarpSize; offset *= 2) {
          max = fmaxf(max, __shfl_xor_sync(kFullMask, max, offset));
        }
        max = fmaxf(max, state[h].max);  // finite: every tile begins with a token
        keep[h] = exp2_fast(state[h].max - max);
        state[h].max = max;
        state[h].sum *= keep[h];
#pragma unroll
        for (int i = 0; i < 2 * kSubtiles; i++) {
          float& x = score[i / 2][i % 2 * 2 + h];
          x = exp2_fast(x - max);
          state[h].sum += x;
        }
      }
      u32 weight[kSubtiles][2];
#pragma unroll
      for (int u = 0; u < kSubtiles; u++) {
        weight[u][0] = transpose_8x8(pack2<T>(score[u][0], score[u][1]));
        weight[u][1] = transpose_8x8(pack2<T>(score[u][2], score[u][3]));
      }
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
#pragma unroll
        for (int e = 0; e < 4; e++) out[s][e] *= keep[e % 2];
#pragma unroll
        for (int u = 0; u < kSubtiles; u++) {
          // Matrices: dimensions 0-7 and 8-15 of 16 with tokens 0-7, then with tokens 8-15.
          const int r = 16 * u + lane / 16 * 8 + lane % 8, chunk = 2 * s + lane / 8 % 2;
          u32 a[4];
          ldmatrix_x4_trans(a, v_tile + 16 * swizzled_chunk<kChunks>(r, chunk));
          mma_m16n8k16<T>(out[s], a, weight[u][0], weight[u][1]);
        }
      }
      __syncwarp();  // before the stage is filled again
      copy_tile(stage, ahead, ids);
      ahead = next(ahead);
      stage = (stage + 1) % kStages;
    }

#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int offset = 4; offset < kWarpSize; offset *= 2) {
        state[h].sum += __shfl_xor_sync(kFullMask, state[h].sum, offset);
      }
      float* const p = &warp_out[warp][2 * pair + h][group];
#pragma unroll
      for (int s = 0; s < kSteps; s++) p[16 * s] = out[s][h], p[16 * s + 8] = out[s][h + 2];
      if (group == 0) warp_state[warp][2 * pair + h] = state[h];
    }
    __syncthreads();
    Partial<kVecs> merged;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      Partial<kVecs> one;
      one.state = warp_state[w][head];
#pragma unroll
      for (int v = 0; v < kVecs; v++) {
        one.out[v] = *reinterpret_cast<const float4*>(&warp_out[w][head][dim + 64 * v]);
      }
      merged.merge(one);
    }
    __syncthreads();  // before the next partition overwrites what the warps left
    if (blocks == 1) {
      total.merge(merged);
    } else if (head < heads) {
      if (dim == 0) partial_state[place(part)] = merged.state;
#pragma unroll
      for (int v = 0; v < kVecs; v++) {
        *reinterpret_cast<float4*>(&partial_out[place(part) * HEAD_DIM + dim + 64 * v]) =
            merged.out[v];
      }
    }
  }

  if (blocks > 1) {
    __threadfence();  // this block's states before its count,
    __syncthreads();
    if (threadIdx.x == 0) {
      // The last one wraps the counter to zero, ready for the next launch.
      u32* const done = &blocks_done[row * gridDim.y + blockIdx.y];
      is_last = atomicInc(done, blocks - 1) == static_cast<u32>(blocks - 1);
    }
    __syncthreads();
    if (!is_last || head >= heads) return;
    __threadfence();  // and the count before the other blocks' states
    constexpr int kBatch = 8;  // loads in flight
    for (int part = 0; part < parts; part += kBatch) {
      Partial<kVecs> batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const i64 from = place(min(part + i, parts - 1));
        batch[i].state = partial_state[from];
#pragma unroll
        for (int v = 0; v < kVecs; v++) {
          batch[i].out[v] =
              *reinterpret_cast<const float4*>(&partial_out[from * HEAD_DIM + dim + 64 * v]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        if (part + i < parts) total.merge(batch[i]);
      }
    }
  }
  store(total, 1.0f / total.state.sum);
}
