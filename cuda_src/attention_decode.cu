// Attention of one new token per row over its paged context:
//   y[row, head] = sum_p softmax_p(scale * q[row, head] . k[p]) v[p],  p = 0 .. seq_len - 1
//
// q, y [rows, num_heads * HEAD_DIM] with a row stride; the cache as in paged_kv.cuh. Query heads
// kv_head * group_size + 0..group_size-1 read KV head kv_head. With ROPE, `q` holds the heads of q,
// k and v of the new token in this order, not rotated: q and k are rotated here (rotation.cuh), and
// k and v written to their place in the cache; both are rounded to T as separate kernels would.
//
// A context is cut into at most kMaxPartitions partitions whose length depends on that context
// alone. Every kHeads query heads of one KV head make a head block. With WHOLE each block takes a
// row and head block. Otherwise the list of all partitions, by row, head block and place in the
// context, is divided evenly among the blocks of the grid, which are all resident at once: each
// takes one piece. A block that has all partitions of a row and head block merges them as it goes.
// Otherwise their states go to scratch, and the block that is done last merges them. Either way
// partitions merge in order of the context, so a row's result is the same to the bit whichever
// rows share its batch and however many blocks there are. Launches of one module must not overlap:
// they share the counters by which the last block knows that it is the last.
//
// The warps of a block take tiles of kTile tokens in turn (decode_tile.cuh), each through its own
// ring of STAGES tiles in shared memory (cp.async), which runs on from partition to partition and
// from row to row: no barrier but at a partition's end. A stage is filled again when its tile is
// done, or, if it is the only one, its keys as soon as there are scores, then its values: half of
// the memory then keeps more blocks on an SM.
//
// Loops are not unrolled: in a decode step a kernel's code is read from memory each time, since the
// weights pass through the caches in between.
//
// A row of length 0 is padding: its output is 0, and its slot is not looked at. Meanwhile
// `ahead_bytes` of weights at `ahead`, which later kernels read, are brought to L2.
//
// Bytes: K and V once (again for each further kHeads query heads of a KV head). Bound: memory.
#include "attention_work.cuh"
#include "decode_tile.cuh"
#include "mma.cuh"
#include "paged_kv.cuh"
#include "prefetch.cuh"
#include "rotation.cuh"
#include "softmax_state.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kHeads = 8;         // query heads of a block: columns of an mma
constexpr int kMaxBlocks = 1024;  // of a grid
constexpr int kTileBytes = 4096;  // of keys, and of values
// Partitions done of the row and head block whose first one a block has; zero between launches.
__device__ u32 partitions_done[kMaxBlocks];

template <typename T, int HEAD_DIM, bool ROPE, bool WHOLE, int STAGES>
__global__ void __launch_bounds__(kThreads, (HEAD_DIM == 64 ? 3 : 2) + (STAGES == 1))
    attention_decode_kernel(const T* q, T* kv_cache, const i32* block_tables,
                            const i32* batch_slots, const i32* seq_lens,
                            const float* __restrict__ inv_freq, T* y, float* partial_out,
                            SoftmaxState* partial_state, float scale_log2, int num_rows,
                            int q_stride, int y_stride, i64 block_stride, int num_kv_heads,
                            int group_size, int block_shift, int max_blocks, int max_partitions,
                            const u8* __restrict__ ahead, int ahead_bytes) {
  constexpr int kChunks = HEAD_DIM / 8;           // 16-byte chunks of a token's key
  constexpr int kCopyRows = kWarpSize / kChunks;  // tokens that a warp copies at once
  constexpr int kTile = kTileBytes / (HEAD_DIM * sizeof(T));
  constexpr int kStride = kWarps * kTile;  // tokens from a warp's tile to its next
  constexpr int kSteps = HEAD_DIM / 16;  // mma steps along HEAD_DIM
  constexpr int kVecs = HEAD_DIM / 64;   // float4 of a head's output that a merging thread owns
  constexpr int kPitch = HEAD_DIM + 4;   // the lanes of a fragment hit all banks once
  constexpr int kHalf = HEAD_DIM / 2;    // pairs that turn
  static_assert(kMinPartition % kStride == 0, "partitions are whole rounds of the warps");

  extern __shared__ __align__(128) unsigned char tiles[];  // [warp][stage][K, V][kTile][HEAD_DIM]
  __shared__ __align__(16) float warp_out[kWarps][kHeads][kPitch];
  __shared__ SoftmaxState warp_state[kWarps][kHeads];
  __shared__ SinCos angle[ROPE ? kHalf : 1];  // of the row's new token
  __shared__ bool is_last;

  start_next();
  prefetch_share(ahead, ahead_bytes);
  const float frequency = ROPE ? inv_freq[threadIdx.x % kHalf] : 0.0f;
  wait_for_previous();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int group = lane / 4, pair = lane % 4;
  // As a merging thread:
  const int head = threadIdx.x / 16, dim = threadIdx.x % 16 * 4;  // and dim + 64, ...
  const int parts_of_group = ceil_div(group_size, kHeads);
  const Work work(WHOLE, num_rows, num_kv_heads * parts_of_group, seq_lens, batch_slots);
  if (work.first.index == work.end) return;

  // What a head block stands for.
  const auto kv_head_of = [&](int head_block) { return head_block / parts_of_group; };
  const auto first_in_group = [&](int head_block) { return head_block % parts_of_group * kHeads; };
  const auto num_heads = [&](int b) { return min(kHeads, group_size - first_in_group(b)); };
  const auto first_head = [&](int b) { return kv_head_of(b) * group_size + first_in_group(b); };

  // The queries of a row and head block, as B of S^T; columns beyond its heads are zeros. The new
  // token's key (lanes 0-15) and value (16-31): kPairs neighbours of each half.
  constexpr int kPairs = kHalf / 16;
  const int new_pair = lane % 16 * kPairs;
  u32 query[kSteps][2];
  Vec<T, kPairs> new_low, new_high;
  const auto load_query = [&](const Place& at) {
    const bool used = group < num_heads(at.head_block);
    const T* const of_row = q + static_cast<i64>(at.row) * q_stride;
    const T* const p = of_row + (first_head(at.head_block) + group) * HEAD_DIM + 2 * pair;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      query[s][0] = used ? *reinterpret_cast<const u32*>(p + 16 * s) : 0;
      query[s][1] = used ? *reinterpret_cast<const u32*>(p + 16 * s + 8) : 0;
    }
    if (ROPE) {
      const int heads_before = num_kv_heads * (group_size + lane / 16) + kv_head_of(at.head_block);
      const T* const source = of_row + heads_before * HEAD_DIM + new_pair;
      new_low = *reinterpret_cast<const Vec<T, kPairs>*>(source);
      new_high = *reinterpret_cast<const Vec<T, kPairs>*>(source + kHalf);
    }
  };
  Place here = work.first;
  load_query(here);

  // A tile to copy: blocks of each 8 tokens (block sizes start at 8). Positions beyond the length
  // are never looked up: their blocks may not exist, their memory may hold NaN.
  struct Tile {
    int block[kTile / 8];
    int kv_head, position, length;  // empty if the position is not below the length
  };
  const auto cache_of = [&](int slot, int kv_head) {
    return PagedKv<T>(kv_cache, block_stride, num_kv_heads, kv_head, block_tables, max_blocks, slot,
                      block_shift, HEAD_DIM);
  };
  // The place of the copies, which runs ahead of the products', and this warp's next tile there.
  Place copied = work.first;
  int copied_position = copied.first_token() + warp * kTile;
  const auto take_tile = [&] {
#pragma unroll 1
    while (copied.index < work.end && copied_position >= copied.end()) {
      work.advance(copied);
      copied_position = copied.first_token() + warp * kTile;
    }
    Tile tile;
    tile.position = tile.length = 0;
    if (copied.index == work.end) return tile;
    tile.kv_head = kv_head_of(copied.head_block);
    tile.position = copied_position;
    tile.length = copied.length;
    const PagedKv<T> kv = cache_of(copied.slot, tile.kv_head);
#pragma unroll
    for (int i = 0; i < kTile / 8; i++) {
      tile.block[i] = kv.block(min(tile.position + 8 * i, tile.length - 1));
    }
    copied_position += kStride;
    return tile;
  };
  unsigned char* const ring = tiles + warp * STAGES * 2 * kTileBytes;
  const u32 ring_address = smem_address(ring);
  const int copy_row = lane / kChunks, copy_chunk = lane % kChunks;
  // Its keys (part 0), values (1) or both (0 to 1).
  const auto copy_parts = [&](const Tile& tile, int stage, int first_part, int last_part) {
    if (tile.position < tile.length) {
      const int limit = tile.length - ROPE;  // the new token comes from q, later
      const PagedKv<T> kv = cache_of(0, tile.kv_head);
#pragma unroll
      for (int r = 0; r < kTile; r += kCopyRows) {
        const int eight = tile.position + r / 8 * 8, place = r % 8 + copy_row;
        const T* const key = kv.key(tile.block[r / 8], eight) + place * HEAD_DIM + copy_chunk * 8;
        const u32 to = ring_address + stage * 2 * kTileBytes +
                       16 * swizzled_chunk<kChunks>(r + copy_row, copy_chunk);
        const bool valid = eight + place < limit;  // else zeros: 0 * NaN would be NaN
#pragma unroll
        for (int part = first_part; part <= last_part; part++) {
          cp_async_16(to + part * kTileBytes, key + part * kv.v_offset, valid);
        }
      }
    }
    cp_async_commit();  // possibly empty, so that "all but the last" always means the next needed
  };
  const auto wait_for_oldest = [&] {
    cp_async_wait<1>();
    __syncwarp();
  };

  {
    Tile first[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; s++) first[s] = take_tile();
    copy_parts(first[0], 0, 0, STAGES == 1 ? 0 : 1);
    copy_parts(first[STAGES - 1], STAGES - 1, STAGES == 1 ? 1 : 0, 1);
  }

  const auto rotate_query = [&] {
#pragma unroll
    for (int s = 0; s < kSteps / 2; s++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const SinCos* r = &angle[16 * s + 8 * i + 2 * pair];
        const float2 low = unpack2<T>(query[s][i]), high = unpack2<T>(query[s + kSteps / 2][i]);
        const float2 x = rotate_pair(low.x, high.x, r[0]), z = rotate_pair(low.y, high.y, r[1]);
        query[s][i] = pack2<T>(x.x, z.x);
        query[s + kSteps / 2][i] = pack2<T>(x.y, z.y);
      }
    }
  };
  const auto find_angles = [&](int length) {
    if (ROPE && threadIdx.x < kHalf) {
      angle[threadIdx.x] = rope_angle(max(length - 1, 0), frequency);
    }
  };
  find_angles(here.length);
  if (ROPE) {
    __syncthreads();
    rotate_query();
  }
  Partial<kVecs> total;
  int stage = 0;
  int run = min(work.end - here.index, here.parts() - here.part);  // of this row and head block
  int run_left = run;
#pragma unroll 1
  while (true) {
    // Of this warp's tiles and columns 2 pair and 2 pair + 1; `sum`: of this lane's tokens only.
    float out[kSteps][4] = {};
    SoftmaxState state[2] = {SoftmaxState::empty(), SoftmaxState::empty()};

    const int end = here.end();
#pragma unroll 1
    for (int t = here.first_token() + warp * kTile; t < end; t += kStride) {
      const Tile next_tile = take_tile();
      const u32 k_tile = ring_address + stage * 2 * kTileBytes, v_tile = k_tile + kTileBytes;
      const bool has_new = ROPE && t + kTile >= here.length;
      wait_for_oldest();
      if (has_new) {
        if (STAGES == 1) {  // the values
          cp_async_wait<0>();
          __syncwarp();
        }
        Vec<T, kPairs> low = new_low, high = new_high;
        if (lane < 16) {
#pragma unroll
          for (int i = 0; i < kPairs; i++) {
            const float2 turned =
                rotate_pair(to_float(low.v[i]), to_float(high.v[i]), angle[new_pair + i]);
            low.v[i] = from_float<T>(turned.x);
            high.v[i] = from_float<T>(turned.y);
          }
        }
        const int position = here.length - 1;
        unsigned char* const tile = ring + (stage * 2 + lane / 16) * kTileBytes;
        const auto in_tile = [&](int d) {
          const int chunk = swizzled_chunk<kChunks>(position - t, d / 8);
          return reinterpret_cast<Vec<T, kPairs>*>(tile + 16 * chunk + d % 8 * sizeof(T));
        };
        *in_tile(new_pair) = low;
        *in_tile(new_pair + kHalf) = high;
        if (first_in_group(here.head_block) == 0) {
          const PagedKv<T> kv = cache_of(here.slot, kv_head_of(here.head_block));
          T* const target = kv.key(position) + lane / 16 * kv.v_offset + new_pair;
          *reinterpret_cast<Vec<T, kPairs>*>(target) = low;
          *reinterpret_cast<Vec<T, kPairs>*>(target + kHalf) = high;
        }
        __syncwarp();
      }

      float score[kTile / 16][4] = {};
      add_scores<T>(score, query, k_tile);
      if (STAGES == 1) {
        __syncwarp();  // before the keys make way for others
        copy_parts(next_tile, stage, 0, 0);
      }
      float keep[2];
      to_weights(score, keep, state, scale_log2, here.length - t);
      if (STAGES == 1) wait_for_oldest();  // the values
      add_values<T>(out, keep, score, v_tile);
      __syncwarp();
      copy_parts(next_tile, stage, STAGES == 1 ? 1 : 0, 1);
      stage = (stage + 1) % STAGES;
    }

    Place after = here;
    work.advance(after);
    const bool run_ends = --run_left == 0;
    const bool more = !WHOLE && after.index < work.end;  // to come after this run
    if (run_ends && more) load_query(after);  // arrives while the warps merge

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
    if (run_ends && more && after.row != here.row) find_angles(after.length);
    __syncthreads();  // before the next partition overwrites what the warps left

    const int heads = num_heads(here.head_block);
    const bool whole = WHOLE || run == here.parts();
    const int owner = whole ? 0 : work.owner(here.index - here.part);
    const int head_places = min(kHeads, group_size);
    const int first_place = owner * max_partitions * head_places + head;
    if (whole) {
      total.merge(merged);
    } else if (head < heads) {
      const int at = first_place + here.part * head_places;
      if (dim == 0) partial_state[at] = merged.state;
#pragma unroll
      for (int v = 0; v < kVecs; v++) {
        *reinterpret_cast<float4*>(&partial_out[at * HEAD_DIM + dim + 64 * v]) = merged.out[v];
      }
    }
    if (!run_ends) {
      here = after;
      continue;
    }
    if (!whole) {
      __threadfence();  // this block's states before its count,
      __syncthreads();
      if (threadIdx.x == 0) {
        u32* const done = &partitions_done[owner];
        is_last = atomicAdd(done, run) + run == here.parts();
        if (is_last) *done = 0;  // ready for the next launch
      }
      __syncthreads();
    }
    if ((whole || is_last) && head < heads) {
      if (!whole) {
        __threadfence();  // and the count before the other blocks' states
        constexpr int kBatch = 16 / kVecs;  // loads in flight
#pragma unroll 1
        for (int part = 0; part < here.parts(); part += kBatch) {
          Partial<kVecs> batch[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; i++) {
            const int from = first_place + min(part + i, here.parts() - 1) * head_places;
            batch[i].state = partial_state[from];
#pragma unroll
            for (int v = 0; v < kVecs; v++) {
              batch[i].out[v] =
                  *reinterpret_cast<const float4*>(&partial_out[from * HEAD_DIM + dim + 64 * v]);
            }
          }
#pragma unroll
          for (int i = 0; i < kBatch; i++) {
            if (part + i < here.parts()) total.merge(batch[i]);
          }
        }
      }
      const float factor = here.length > 0 ? 1.0f / total.state.sum : 0.0f;
      T* const to = y + static_cast<i64>(here.row) * y_stride +
                    (first_head(here.head_block) + head) * HEAD_DIM + dim;
#pragma unroll
      for (int v = 0; v < kVecs; v++) {
        *reinterpret_cast<uint2*>(to + 64 * v) = {
            pack2<T>(total.out[v].x * factor, total.out[v].y * factor),
            pack2<T>(total.out[v].z * factor, total.out[v].w * factor)};
      }
    }
    if (!more) return;
    total = {};
    here = after;
    run = run_left = min(work.end - here.index, here.parts());
    if (ROPE) rotate_query();
  }
}
