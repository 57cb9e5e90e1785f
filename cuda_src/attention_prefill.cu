// Causal attention of chunks of new tokens over their paged context (flash attention):
//   y[t, head] = sum_p softmax_p(scale * q[t, head] . k[p]) v[p],  p = 0 .. position of t
//
// q, y [tokens, num_heads * HEAD_DIM] with a row stride; tokens query_start[row] ..
// query_start[row + 1] - 1 are the last ones of row's seq_lens[row] positions, and their own K and
// V are in the cache (paged_kv.cuh) already. Query heads kv_head * group_size + 0..group_size-1
// read KV head kv_head.
//
// Block (x, head, z): kQueries queries of one head of row first_row + z, the tiles with the
// longest contexts first; 16 queries a warp. K and V come in tiles of kKeys tokens through two
// stages of shared memory (cp.async while the tile before is used). Scores, softmax state and
// output stay in registers: S = Q K^T is an mma accumulator, which packed to T is the A operand of
// O += P V.
//
// Bound: tensor cores, 4 * HEAD_DIM operations for each (query, key) pair of each head.
#include "mma.cuh"
#include "paged_kv.cuh"
#include "softmax_state.cuh"

constexpr int kThreads = 128;
constexpr int kQueries = 64;  // as in tinyvllm/ops/attention.py
constexpr int kKeys = 64;

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(kThreads)
    attention_prefill_kernel(const T* q, const T* kv_cache, const i32* block_tables,
                             const i32* query_start, const i32* batch_slots, const i32* seq_lens,
                             T* y, float scale_log2, int first_row, int q_stride, int y_stride,
                             i64 block_stride, int num_kv_heads, int group_size, int block_shift,
                             int max_blocks) {
  constexpr int kChunks = HEAD_DIM / 8;  // 16-byte chunks of a token's key
  constexpr int kTileBytes = kKeys * HEAD_DIM * sizeof(T);
  constexpr int kSteps = HEAD_DIM / 16;  // mma steps along HEAD_DIM
  extern __shared__ __align__(128) unsigned char tiles[];  // [2 stages][K, V][kKeys][HEAD_DIM]

  start_next();
  wait_for_previous();
  const int row = first_row + blockIdx.z, head = blockIdx.y;
  const int token0 = query_start[row], num_queries = query_start[row + 1] - token0;
  const int tile0 = (gridDim.x - 1 - blockIdx.x) * kQueries;
  if (tile0 >= num_queries) return;
  const int context = seq_lens[row] - num_queries;                       // position of query 0
  const int num_keys = context + min(tile0 + kQueries, num_queries);     // that this tile may see
  const PagedKv<const T> kv(kv_cache, block_stride, num_kv_heads, head / group_size, block_tables,
                            max_blocks, batch_slots[row], block_shift, HEAD_DIM);

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int group = lane / 4, pair = lane % 4;
  const int warp_query0 = tile0 + warp * 16;
  const int query[2] = {warp_query0 + group, warp_query0 + group + 8};  // this thread's two rows
  // Of the last key that any query of this warp sees; a warp without queries sees none.
  const int last_key = warp_query0 < num_queries ? context + warp_query0 + 15 : -1;

  u32 q_fragment[kSteps][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const T* p = q + static_cast<i64>(token0 + query[half]) * q_stride + head * HEAD_DIM + 2 * pair;
    const bool valid = query[half] < num_queries;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      q_fragment[s][half] = valid ? *reinterpret_cast<const u32*>(p + 16 * s) : 0;
      q_fragment[s][half + 2] = valid ? *reinterpret_cast<const u32*>(p + 16 * s + 8) : 0;
    }
  }

  // Tokens from num_keys on become zeros: masked scores have weight 0, but 0 * NaN would be NaN.
  const u32 smem = smem_address(tiles);
  auto load_tile = [&](int stage, int key0) {
    constexpr int kRows = kThreads / kChunks;  // tokens that the block copies at once
    const int first = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const u32 k_tile = smem + stage * 2 * kTileBytes;
    // All block ids before the first copy, so that their latencies overlap.
    int block[kKeys / kRows];
#pragma unroll
    for (int i = 0; i < kKeys / kRows; i++) {
      block[i] = kv.block(min(key0 + first + i * kRows, num_keys - 1));
    }
#pragma unroll
    for (int i = 0; i < kKeys / kRows; i++) {
      const int r = first + i * kRows;
      const bool valid = key0 + r < num_keys;
      const T* key = kv.key(block[i], key0 + r) + chunk * 8;
      const u32 dst = k_tile + 16 * swizzled_chunk<kChunks>(r, chunk);
      cp_async_16(dst, key, valid);
      cp_async_16(dst + kTileBytes, key + kv.v_offset, valid);
    }
  };

  float out[2 * kSteps][4] = {};  // n8 tiles along HEAD_DIM
  float row_max[2] = {kNegInf, kNegInf}, row_sum[2] = {};  // sum: of this thread's columns only

  const int num_tiles = ceil_div(num_keys, kKeys);
  load_tile(0, 0);
  cp_async_commit();
  for (int t = 0; t < num_tiles; t++) {
    const int key0 = t * kKeys;
    if (t + 1 < num_tiles) load_tile((t + 1) % 2, key0 + kKeys);
    cp_async_commit();  // possibly empty, so that "all but one" always means tile t
    cp_async_wait<1>();
    __syncthreads();
    if (key0 <= last_key) {
      const u32 k_tile = smem + t % 2 * 2 * kTileBytes, v_tile = k_tile + kTileBytes;

      float score[kKeys / 8][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
#pragma unroll
        for (int n = 0; n < kKeys / 16; n++) {
          // Matrices: keys 0-7 and 8-15 of 16, each with dimensions 0-7 and 8-15 of 16.
          const int r = n * 16 + lane / 16 * 8 + lane % 8, chunk = 2 * s + lane / 8 % 2;
          u32 b[4];
          ldmatrix_x4(b, k_tile + 16 * swizzled_chunk<kChunks>(r, chunk));
          mma_m16n8k16<T>(score[2 * n], q_fragment[s], b[0], b[1]);
          mma_m16n8k16<T>(score[2 * n + 1], q_fragment[s], b[2], b[3]);
        }
      }
      if (key0 + kKeys - 1 > context + warp_query0) {  // only tiles on the diagonal
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (key0 + n * 8 + 2 * pair + e % 2 > context + query[e / 2]) score[n][e] = kNegInf;
          }
        }
      }

      // Key 0 is in every query's first tile, so the maximum is finite from then on.
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float new_max = row_max[half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++) {
          new_max = fmaxf(new_max, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        }
        new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 1));
        new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 2));
        const float keep = exp2_fast((row_max[half] - new_max) * scale_log2);
        const float offset = new_max * scale_log2;
        row_max[half] = new_max;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; e++) {
            score[n][e] = exp2_fast(fmaf(score[n][e], scale_log2, -offset));
            sum += score[n][e];
          }
        }
        row_sum[half] = fmaf(row_sum[half], keep, sum);
#pragma unroll
        for (int n = 0; n < 2 * kSteps; n++) {
          out[n][2 * half] *= keep;
          out[n][2 * half + 1] *= keep;
        }
      }

#pragma unroll
      for (int k = 0; k < kKeys / 16; k++) {
        const u32 weight[4] = {pack2<T>(score[2 * k][0], score[2 * k][1]),
                               pack2<T>(score[2 * k][2], score[2 * k][3]),
                               pack2<T>(score[2 * k + 1][0], score[2 * k + 1][1]),
                               pack2<T>(score[2 * k + 1][2], score[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < kSteps; n++) {
          // Matrices: dimensions 0-7 and 8-15 of 16, each with keys 0-7 and 8-15 of 16.
          const int r = k * 16 + lane / 8 % 2 * 8 + lane % 8, chunk = 2 * n + lane / 16;
          u32 b[4];
          ldmatrix_x4_trans(b, v_tile + 16 * swizzled_chunk<kChunks>(r, chunk));
          mma_m16n8k16<T>(out[2 * n], weight, b[0], b[1]);
          mma_m16n8k16<T>(out[2 * n + 1], weight, b[2], b[3]);
        }
      }
    }
    __syncthreads();  // before the stage is filled again
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    if (query[half] >= num_queries) continue;
    const float inverse = 1.0f / sum;
    T* p = y + static_cast<i64>(token0 + query[half]) * y_stride + head * HEAD_DIM + 2 * pair;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; n++) {
      *reinterpret_cast<u32*>(p + 8 * n) =
          pack2<T>(out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
    }
  }
}
