// Causal attention of chunks of new tokens over their paged context, at the speed of Hopper's
// tensor cores (sm_90a): the formula and the rows of attention_prefill.cu. q and the KV cache come
// as tensor maps, in boxes of 64 elements of a head. The cache is a matrix of HEAD_DIM columns: row
// block * block_rows + layer_row + place is a key of KV head 0; the keys of the other heads follow,
// then the values.
//
// A tile is 64 queries of one head for each of CONSUMERS warpgroups (query_tiles.cuh). A producer
// warp fills a buffer with its queries and, kStages deep, buffers with kKeys keys and their values:
// its lanes look up the block table and start the copies (TMA) that put each block of the cache
// where a contiguous one would have it. Consumers take from there, by wgmma,
//   S = Q K^T (both in shared memory), softmax in registers, O += P V (P in registers).
// The scores of a tile of keys and the values of the one before are multiplied at once, and the
// consumers take turns to start products, so that one's exponentials run while others' products do.
//
// Blocks stay, one an SM. The first tile of each is that of its own number; the next is drawn from
// a counter when the last keys of a tile are about to be copied, so that tiles go where there is
// time for them, and copies run on from tile to tile.
//
// The order in which a row is reduced depends on its position alone: tiles of kKeys keys from key 0
// on. So the result is the same to the bit with any CONSUMERS. Launches of one module must not
// overlap: they share the counters.
//
// Bound: tensor cores, 4 * HEAD_DIM operations for each (query, key) pair of each head.
#include "query_tiles.cuh"
#include "tma.cuh"
#include "wgmma_attention.cuh"

constexpr int kKeys = 128;
constexpr int kStages = 3;

__device__ u32 tiles_drawn, blocks_done;  // zero between launches

// Shared addresses. `work` is the tile that q belongs to: token, queries, position, head.
// `value_tail` completes when the last values of a context are there, before what lies beyond them
// is overwritten. Barriers of one kind are 8 bytes apart, one for each stage.
template <int HEAD_DIM, int CONSUMERS> struct Buffers {
  // Tiles are cut into halves of 64 columns, 128 bytes, which TMA permutes (swizzled_chunk<8>).
  static constexpr int kHalves = HEAD_DIM / 64;
  static constexpr u32 kQueryHalf = 64 * CONSUMERS * 128, kHalf = kKeys * 128;  // bytes
  static constexpr u32 kTile = kHalf * kHalves;

  u32 q, k, v, work, q_full, q_empty, value_tail, k_full, k_empty, v_full, v_empty;

  __device__ __forceinline__ explicit Buffers(u32 start)
      : q(start),
        k(q + kQueryHalf * kHalves),
        v(k + kStages * kTile),
        work(v + kStages * kTile),
        q_full(work + 16),
        q_empty(q_full + 8),
        value_tail(q_empty + 8),
        k_full(value_tail + 8),
        k_empty(k_full + 8 * kStages),
        v_full(k_empty + 8 * kStages),
        v_empty(v_full + 8 * kStages) {}

  // By one thread. A buffer is empty when each of the consumers' warps says so.
  __device__ __forceinline__ void init_barriers() const {
    barrier_init(q_full, 1);
    barrier_init(q_empty, 4 * CONSUMERS);
    barrier_init(value_tail, 1);
    for (int i = 0; i < kStages; i++) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, 4 * CONSUMERS);
      barrier_init(v_empty + 8 * i, 4 * CONSUMERS);
    }
    fence_barrier_init();
  }
};

__device__ __forceinline__ void store_shared(u32 address, int4 v) {
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

__device__ __forceinline__ int from_lane_0(int v) {
  return __shfl_sync(kFullMask, v, 0);
}

// Named barriers of two warpgroups: one waits for the other to arrive.
__device__ __forceinline__ void await_turn(int turn) {
  asm volatile("bar.sync %0, 256;" ::"r"(turn) : "memory");
}

__device__ __forceinline__ void give_turn(int turn) {
  asm volatile("bar.arrive %0, 256;" ::"r"(turn) : "memory");
}

template <typename T, int HEAD_DIM, int CONSUMERS>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_prefill_hopper_kernel(const __grid_constant__ TensorMap q_map,
                                    const __grid_constant__ TensorMap kv_map,
                                    const i32* block_tables, const i32* query_start,
                                    const i32* batch_slots, const i32* seq_lens, T* y,
                                    float scale_log2, int num_rows, int num_heads, int group_size,
                                    int y_stride, int block_rows, int layer_row, int block_shift,
                                    int max_blocks) {
  using Shared = Buffers<HEAD_DIM, CONSUMERS>;
  constexpr int kHalves = Shared::kHalves;
  constexpr u32 kQueryHalf = Shared::kQueryHalf, kHalf = Shared::kHalf, kTile = Shared::kTile;
  static_assert(kKeys / 8 * kHalves <= kWarpSize, "a lane for each piece of a tile");
  extern __shared__ __align__(1024) u8 memory[];
  const Shared shared(smem_address(memory));

  start_next();
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  wait_for_previous();

  const int lane = threadIdx.x % kWarpSize;
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0);
  if (warp < 4) {
    give_registers<CONSUMERS == 2 ? 40 : 32>();
    if (warp > 0) return;
    prefetch_map(q_map);
    prefetch_map(kv_map);
    QueryTiles<64 * CONSUMERS> tiles(query_start, batch_slots, seq_lens, num_rows, num_heads);
    // A lane copies one piece of each tile of keys and of values: a half of what one block has.
    const int pieces = kKeys >> block_shift;
    const int half = lane / pieces, piece = lane % pieces;
    const u32 place = half * kHalf + piece * (128u << block_shift);
    const int v_rows = (num_heads / group_size) << block_shift;  // from a key to its value
    u32 loaded = 0, tails = 0;
    int index = blockIdx.x;
    for (u32 n = 0;; n++) {
      const QueryTile tile = tiles.find(index);
      barrier_wait(shared.q_empty, ~n & 1);
      if (lane == 0) {
        store_shared(shared.work, {tile.token, tile.queries, tile.position, tile.head});
        if (tile.queries > 0) {
          barrier_expect(shared.q_full, kQueryHalf * kHalves);
          for (int h = 0; h < kHalves; h++) {
            tma_load(shared.q + h * kQueryHalf, q_map, tile.token, tile.head * HEAD_DIM + h * 64,
                     shared.q_full);
          }
        } else {
          barrier_arrive(shared.q_full);
        }
      }
      if (tile.queries == 0) break;

      const i32* table = block_tables + static_cast<i64>(tile.slot) * max_blocks;
      const int head_row = layer_row + ((tile.head / group_size) << block_shift);
      const int num_tiles = ceil_div(tile.num_keys(), kKeys);
      const auto block_of = [&](int t) {  // that this lane copies from; -1: nothing to copy
        const int position = t * kKeys + (piece << block_shift);
        return half < kHalves && position < tile.length ? table[position >> block_shift] : -1;
      };
      int block = block_of(0), drawn = 0;
      for (int t = 0; t < num_tiles; t++, loaded++) {
        const int row = block * block_rows + head_row;
        const bool valid = block >= 0;
        const u32 bytes = __popc(__ballot_sync(kFullMask, valid)) * (128u << block_shift);
        block = block_of(t + 1);
        if (t == num_tiles - 1 && lane == 0) drawn = atomicAdd(&tiles_drawn, 1);
        const u32 stage = loaded % kStages, parity = ~(loaded / kStages) & 1;
        const u32 k_full = shared.k_full + 8 * stage, v_full = shared.v_full + 8 * stage;
        barrier_wait(shared.k_empty + 8 * stage, parity);
        if (lane == 0) barrier_expect(k_full, bytes);
        __syncwarp();
        if (valid) tma_load(shared.k + stage * kTile + place, kv_map, row, half * 64, k_full);
        barrier_wait(shared.v_empty + 8 * stage, parity);
        const int end = tile.length - t * kKeys;
        const u32 v_tile = shared.v + stage * kTile;
        const u32 report = end < kKeys ? shared.value_tail : v_full;
        if (lane == 0) barrier_expect(report, bytes);
        __syncwarp();
        if (valid) tma_load(v_tile + place, kv_map, row + v_rows, half * 64, report);
        if (end < kKeys) {  // what lies beyond the context must be 0: weights 0 times NaN are NaN
          barrier_wait(shared.value_tail, tails++ & 1);
          for (u32 i = end * 128 + lane * 16; i < kHalf; i += kWarpSize * 16) {
            for (int h = 0; h < kHalves; h++) store_shared(v_tile + h * kHalf + i, int4{});
          }
          fence_async();
          __syncwarp();
          if (lane == 0) barrier_arrive(v_full);
        }
      }
      index = gridDim.x + __shfl_sync(kFullMask, drawn, 0);
    }
    if (lane == 0) {
      __threadfence();
      if (atomicAdd(&blocks_done, 1) == gridDim.x - 1) tiles_drawn = blocks_done = 0;
    }
  } else {
    take_registers<CONSUMERS == 2 ? 232 : 160>();
    const int group = warp / 4 - 1;
    const int first_of_warp = warp * 16 - 64, pair = lane % 4;
    const int query0 = first_of_warp + lane / 4;  // this lane's rows are this and the one 8 further
    const u64 own_q = wgmma_tile(shared.q + group * (64 * 128));
    const int own_turn = 1 + group, next_turn = 1 + (group + 1) % CONSUMERS;
    const auto release = [&](u32 barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    if (group == CONSUMERS - 1) give_turn(next_turn);

    float out[HEAD_DIM / 2], score[kKeys / 2];
    u32 weight[kKeys / 4];
    u32 used = 0;  // tiles of keys
    for (u32 n = 0;; n++) {
      barrier_wait(shared.q_full, n & 1);
      // Only by the lane that will report q read: nothing would order the others before that.
      int4 work = {};
      if (lane == 0) work = load_shared_int4(shared.work);
      const QueryTile tile = {from_lane_0(work.x), from_lane_0(work.y), from_lane_0(work.z),
                              from_lane_0(work.w)};
      if (tile.queries == 0) break;
      const int num_tiles = ceil_div(tile.num_keys(), kKeys);
      RowsSoftmax rows;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0.0f;

      const auto multiply_scores = [&] {
        const u32 stage = used % kStages;
        barrier_wait(shared.k_full + 8 * stage, used / kStages & 1);
        await_turn(own_turn);
        const u64 k_tile = wgmma_tile(shared.k + stage * kTile);
        wgmma_fence();
        wgmma_scores<T, kKeys, true>(score, own_q, k_tile);
#pragma unroll
        for (int s = 1; s < HEAD_DIM / 16; s++) {
          wgmma_scores<T, kKeys, false>(score,
                                        wgmma_further(own_q, s / 4 * kQueryHalf + s % 4 * 32),
                                        wgmma_further(k_tile, s / 4 * kHalf + s % 4 * 32));
        }
        wgmma_commit();
      };
      const auto multiply_values = [&](u32 of) {
        const u32 stage = of % kStages;
        barrier_wait(shared.v_full + 8 * stage, of / kStages & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / 16; k++) {
          wgmma_values<T, HEAD_DIM>(
              out, weight + 4 * k, wgmma_value_tile(shared.v + stage * kTile + k * 2048, kHalf));
        }
        wgmma_commit();
      };
      const auto mask = [&](int t) {  // keys behind the query
        if (t * kKeys + kKeys - 1 <= tile.position + first_of_warp) return;
        const int beyond = t * kKeys + 2 * pair - tile.position - query0;
#pragma unroll
        for (int i = 0; i < kKeys / 2; i++) {
          if (beyond + i / 4 * 8 + i % 2 > i % 4 / 2 * 8) score[i] = kNegInf;
        }
      };
      const auto pack_weights = [&] {
#pragma unroll
        for (int i = 0; i < kKeys / 4; i++) weight[i] = pack2<T>(score[2 * i], score[2 * i + 1]);
      };

      multiply_scores();
      give_turn(next_turn);
      wgmma_wait<0>();
      touch(score);
      release(shared.k_empty + 8 * (used % kStages));
      if (num_tiles == 1) release(shared.q_empty);
      mask(0);
      rows.take(score, scale_log2);
      pack_weights();
      for (int t = 1; t < num_tiles; t++) {
        const u32 before = used++;
        multiply_scores();
        multiply_values(before);
        give_turn(next_turn);
        wgmma_wait<1>();
        touch(score);
        release(shared.k_empty + 8 * (used % kStages));
        if (t == num_tiles - 1) release(shared.q_empty);
        mask(t);
        rows.take(score, scale_log2);
        wgmma_wait<0>();
        touch(out);
        touch(weight);
        release(shared.v_empty + 8 * (before % kStages));
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] *= rows.keep[i % 4 / 2];
        pack_weights();
      }
      multiply_values(used);
      wgmma_wait<0>();
      touch(out);
      release(shared.v_empty + 8 * (used % kStages));
      used++;

#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float inverse = rows.inverse_sum(r);
        const int query = query0 + 8 * r;
        T* p = y + static_cast<i64>(tile.token + query) * y_stride + tile.head * HEAD_DIM;
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 32; c++) {
          u32 v[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int at = 16 * c + 4 * i + 2 * r;
            v[i] = pack2<T>(out[at] * inverse, out[at + 1] * inverse);
          }
          const uint4 all = gather_row(v);
          if (query < tile.queries) *reinterpret_cast<uint4*>(p + 32 * c + 8 * pair) = all;
        }
      }
    }
    if (group == 0) await_turn(own_turn);  // the last one given: no arrival is left behind
  }
}
