#include "query_tiles.cuh"
#include "softmax_state.cuh"
#include "tma.cuh"
#include "wgmma_attention.cuh"

__device__ u32 next_tile, blocks_done;

template <int COUNT> __device__ __forceinline__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void store_shared_int4(u32 address, int4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ int4 load_shared_int4(u32 address) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// 2^x for x <= 0 by FMAs: relative error 1e-4.
__device__ __forceinline__ float exp2_poly(float x) {
  x = fmaxf(x, -126.0f);
  const float shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float f = x - (shifted - 12582912.0f);  // -0.5 .. 0.5
  float p = fmaf(0.05500858f, f, 0.24221014f);
  p = fmaf(p, f, 0.69328287f);
  p = fmaf(p, f, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

template <typename T, int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, bool PINGPONG, int POLY,
          int SCHEDULE, bool ORDER>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_prefill_hopper_kernel(const __grid_constant__ TensorMap q_map,
                                    const __grid_constant__ TensorMap kv_map,
                                    const i32* block_tables, const i32* query_start,
                                    const i32* batch_slots, const i32* seq_lens, T* y,
                                    float scale_log2, int rows, int num_heads, int group_size,
                                    int y_stride, int block_rows, int layer_row, int block_shift,
                                    int max_blocks) {
  constexpr int kQueries = 64 * CONSUMERS;
  constexpr int kHalves = HEAD_DIM / 64;  // tiles of 64 columns, 128 bytes, which TMA permutes
  constexpr u32 kQHalf = kQueries * 128, kHalf = KEYS * 128;  // bytes
  constexpr u32 kTile = kHalf * kHalves;
  static_assert(KEYS / 8 * kHalves <= kWarpSize, "a lane for each piece of a tile");
  extern __shared__ __align__(1024) u8 shared[];
  const u32 q_tile = smem_address(shared);
  const u32 k_tiles = q_tile + kQHalf * kHalves, v_tiles = k_tiles + STAGES * kTile;
  const u32 work = v_tiles + STAGES * kTile;  // int4: token, queries, position, head
  const u32 q_full = work + 16, q_empty = q_full + 8, v_rest = q_full + 16;
  const u32 k_full = q_full + 32, k_empty = k_full + 8 * STAGES;
  const u32 v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;

  start_next();
  wait_for_previous();
  if (threadIdx.x == 0) {
    barrier_init(q_full, 1);
    barrier_init(q_empty, 4 * CONSUMERS);
    barrier_init(v_rest, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, 4 * CONSUMERS);
      barrier_init(v_empty + 8 * i, 4 * CONSUMERS);
    }
    fence_barrier_init();
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarpSize;
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0);
  if (warp < 4) {
    set_max_registers_down<CONSUMERS == 2 ? 40 : 32>();
    if (warp > 0) return;
    prefetch_map(q_map);
    prefetch_map(kv_map);
    QueryTiles<kQueries> tiles(query_start, batch_slots, seq_lens, rows, num_heads);
    const int pieces = KEYS >> block_shift;  // of a tile's half: one of each block
    const int half = lane / pieces, piece = lane % pieces;
    const u32 place = half * kHalf + piece * (128u << block_shift);
    const int v_rows = (num_heads / group_size) << block_shift;
    u32 loaded = 0, rests = 0;
    int index = blockIdx.x;
    for (u32 n = 0;; n++) {
      const QueryTile tile = tiles.find(index);
      int next = 0;
      if (SCHEDULE == 2 && tile.queries > 0 && lane == 0) {
        next = gridDim.x + atomicAdd(&next_tile, 1);
      }
      barrier_wait(q_empty, ~n & 1);
      if (lane == 0) {
        store_shared_int4(work, {tile.token, tile.queries, tile.position, tile.head});
        if (tile.queries > 0) {
          barrier_expect(q_full, kQHalf * kHalves);
          for (int h = 0; h < kHalves; h++) {
            tma_load(q_tile + h * kQHalf, q_map, tile.token, tile.head * HEAD_DIM + h * 64, q_full);
          }
        } else {
          barrier_arrive(q_full);
        }
      }
      if (tile.queries == 0) break;
      const i32* table = block_tables + static_cast<i64>(tile.slot) * max_blocks;
      const int head_row = layer_row + ((tile.head / group_size) << block_shift);
      const int num_tiles = ceil_div(tile.num_keys(), KEYS);
      const auto block_of = [&](int t) {  // that this lane copies; -1: none
        const int position = t * KEYS + (piece << block_shift);
        return half < kHalves && position < tile.length ? table[position >> block_shift] : -1;
      };
      int block = block_of(0);
      for (int t = 0; t < num_tiles; t++, loaded++) {
        const int row = block * block_rows + head_row;
        const bool valid = block >= 0;
        const u32 bytes = __popc(__ballot_sync(kFullMask, valid)) * (128u << block_shift);
        block = block_of(t + 1);
        const u32 stage = loaded % STAGES, parity = ~(loaded / STAGES) & 1;
        barrier_wait(k_empty + 8 * stage, parity);
        if (lane == 0) barrier_expect(k_full + 8 * stage, bytes);
        __syncwarp();
        if (valid) tma_load(k_tiles + stage * kTile + place, kv_map, row, half * 64, k_full + 8 * stage);
        barrier_wait(v_empty + 8 * stage, parity);
        const int end = tile.length - t * KEYS;
        const u32 v_tile = v_tiles + stage * kTile;
        const u32 report = end < KEYS ? v_rest : v_full + 8 * stage;
        if (lane == 0) barrier_expect(report, bytes);
        __syncwarp();
        if (valid) tma_load(v_tile + place, kv_map, row + v_rows, half * 64, report);
        if (end < KEYS) {  // what lies beyond the context must be 0: 0 * NaN would be NaN
          barrier_wait(v_rest, rests++ & 1);
          for (u32 i = end * 128 + lane * 16; i < kHalf; i += kWarpSize * 16) {
            for (int h = 0; h < kHalves; h++) store_shared_int4(v_tile + h * kHalf + i, {});
          }
          fence_async();
          __syncwarp();
          if (lane == 0) barrier_arrive(v_full + 8 * stage);
        }
      }
      if (SCHEDULE == 2) {
        index = __shfl_sync(kFullMask, next, 0);
      } else if (SCHEDULE == 1) {  // forth and back
        const int b = blockIdx.x, g = gridDim.x;
        index = (n + 1) * g + (n % 2 == 0 ? g - 1 - b : b);
      } else {
        index += gridDim.x;
      }
    }
    if (SCHEDULE == 2 && lane == 0) {
      __threadfence();
      if (atomicAdd(&blocks_done, 1) == gridDim.x - 1) {
        next_tile = 0;
        blocks_done = 0;
      }
    }
  } else {
    set_max_registers_up<CONSUMERS == 2 ? 232 : 160>();
    const int group = warp / 4 - 1;
    const int first_of_warp = warp * 16 - 64, pair = lane % 4;
    const int query0 = first_of_warp + lane / 4;
    const u32 own_q = q_tile + group * (64 * 128);
    const int own_turn = 1 + group, next_turn = 1 + (group + 1) % CONSUMERS;
    const auto take_turn = [&] { if (PINGPONG) named_sync(own_turn, 256); };
    const auto pass_turn = [&] { if (PINGPONG) named_arrive(next_turn, 256); };
    const auto release = [&](u32 barrier) { if (lane == 0) barrier_arrive(barrier); };
    if (group == CONSUMERS - 1) pass_turn();

    float out[HEAD_DIM / 2], score[KEYS / 2];
    u32 weight[KEYS / 4];
    u32 used = 0;  // tiles of keys
    for (u32 n = 0;; n++) {
      barrier_wait(q_full, n & 1);
      const int4 w = load_shared_int4(work);
      const QueryTile tile = {w.x, w.y, w.z, w.w};
      if (tile.queries == 0) break;
      const int num_tiles = ceil_div(tile.num_keys(), KEYS);
      float row_max[2] = {kNegInf, kNegInf}, row_sum[2] = {}, keep[2];
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0.0f;

      const auto multiply_scores = [&] {
        const u32 stage = used % STAGES;
        barrier_wait(k_full + 8 * stage, used / STAGES & 1);
        take_turn();
        const u32 k_tile = k_tiles + stage * kTile;
        wgmma_fence();
        wgmma_scores<T, KEYS, true>(score, wgmma_tile(own_q), wgmma_tile(k_tile));
#pragma unroll
        for (int s = 1; s < HEAD_DIM / 16; s++) {
          wgmma_scores<T, KEYS, false>(score, wgmma_tile(own_q + s / 4 * kQHalf + s % 4 * 32),
                                       wgmma_tile(k_tile + s / 4 * kHalf + s % 4 * 32));
        }
        wgmma_commit();
      };
      const auto multiply_values = [&](u32 of) {
        const u32 stage = of % STAGES;
        barrier_wait(v_full + 8 * stage, of / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
          wgmma_values<T, HEAD_DIM>(
              out, weight + 4 * k, wgmma_value_tile(v_tiles + stage * kTile + k * 2048, kHalf));
        }
        wgmma_commit();
      };
      // Scores of tile t become weights; `keep`: what earlier sums are multiplied by.
      const auto softmax = [&](int t) {
        const int beyond = t * KEYS + 2 * pair - tile.position - query0;
        if (t * KEYS + KEYS - 1 > tile.position + first_of_warp) {
#pragma unroll
          for (int i = 0; i < KEYS / 2; i++) {
            if (beyond + i / 4 * 8 + i % 2 > i % 4 / 2 * 8) score[i] = kNegInf;
          }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float m[2] = {score[2 * r], score[2 * r + 1]};
#pragma unroll
          for (int i = 1; i < KEYS / 8; i++) {
            m[0] = fmaxf(m[0], score[4 * i + 2 * r]);
            m[1] = fmaxf(m[1], score[4 * i + 2 * r + 1]);
          }
          float new_max = fmaxf(fmaxf(m[0], m[1]), row_max[r]);
          new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 1));
          new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, 2));
          keep[r] = exp2_fast((row_max[r] - new_max) * scale_log2);
          row_max[r] = new_max;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float offset = row_max[r] * scale_log2;
          float sum[2] = {};
#pragma unroll
          for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int at = 4 * i + 2 * r + e;
              const float x = fmaf(score[at], scale_log2, -offset);
              score[at] = (i * 2 + e) % 16 < POLY ? exp2_poly(x) : exp2_fast(x);
              sum[e] += score[at];
            }
          }
          row_sum[r] = fmaf(row_sum[r], keep[r], sum[0] + sum[1]);
        }
      };
      const auto pack_weights = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weight[i] = pack2<T>(score[2 * i], score[2 * i + 1]);
      };

      multiply_scores();
      pass_turn();
      wgmma_wait<0>();
      touch(score);
      release(k_empty + 8 * (used % STAGES));
      if (num_tiles == 1) release(q_empty);
      softmax(0);
      pack_weights();
      for (int t = 1; t < num_tiles; t++) {
        const u32 before = used++;
        multiply_scores();
        multiply_values(before);
        pass_turn();
        wgmma_wait<1>();
        touch(score);
        release(k_empty + 8 * (used % STAGES));
        if (t == num_tiles - 1) release(q_empty);
        softmax(t);
        // A branch that needs all weights: the compiler would move the exponentials past the wait.
        if (ORDER && row_sum[0] + row_sum[1] < 0.0f) asm volatile("nanosleep.u32 0;" ::: "memory");
        wgmma_wait<0>();
        touch(out);
        touch(weight);
        release(v_empty + 8 * (before % STAGES));
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] *= keep[i % 4 / 2];
        pack_weights();
      }
      multiply_values(used);
      wgmma_wait<0>();
      touch(out);
      release(v_empty + 8 * (used % STAGES));
      used++;

#pragma unroll
      for (int r = 0; r < 2; r++) {
        float sum = row_sum[r];
        sum += __shfl_xor_sync(kFullMask, sum, 1);
        sum += __shfl_xor_sync(kFullMask, sum, 2);
        const float inverse = 1.0f / sum;
        const int query = query0 + 8 * r;
        T* p = y + static_cast<i64>(tile.token + query) * y_stride + tile.head * HEAD_DIM;
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 32; c++) {
          // Lane `pair` has 2 columns of each of 4 groups of 8; it gets all 8 of group `pair`.
          u32 v[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int at = 16 * c + 4 * i + 2 * r;
            v[i] = pack2<T>(out[at] * inverse, out[at + 1] * inverse);
          }
          const bool odd = pair & 1, high = pair & 2;
          const u32 a = __shfl_xor_sync(kFullMask, odd ? v[0] : v[1], 1);
          const u32 b = __shfl_xor_sync(kFullMask, odd ? v[2] : v[3], 1);
          const u32 w0 = odd ? a : v[0], w1 = odd ? v[1] : a;
          const u32 w2 = odd ? b : v[2], w3 = odd ? v[3] : b;
          const u32 e = __shfl_xor_sync(kFullMask, high ? w0 : w2, 2);
          const u32 f = __shfl_xor_sync(kFullMask, high ? w1 : w3, 2);
          const uint4 all = high ? uint4{e, f, w2, w3} : uint4{w0, w1, e, f};
          if (query < tile.queries) {
            *reinterpret_cast<uint4*>(p + 32 * c + 8 * pair) = all;
          }
        }
      }
    }
    if (group == 0) take_turn();  // the last turn that was passed: no arrival is left behind
  }
}
