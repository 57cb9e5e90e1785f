// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, at the speed of Hopper's tensor cores
// (sm_90a).
//
// Operands: matmul_tile.cuh; x and weight come as tensor maps, read in boxes of 64 elements of K.
// A tile of y has 64 * PARTS rows for each of CONSUMERS warpgroups, and BN weight rows. A producer
// warp fills STAGES buffers in shared memory by TMA, two at a time for the smallest tiles; the
// consumers multiply from there by wgmma and store their rows, while the producer is already loading
// for the next tile. Blocks stay and take tile after tile.
//
// With ALTERNATE each consumer has tiles of its own, of 64 * PARTS rows: one stores while another
// multiplies.
//
// CLUSTER neighbouring tiles along M are worked on by a cluster: each block loads a part of the
// weights that they have in common, for all of them. With SPLIT the `split` blocks of a cluster
// share out K of the same tile, and add up the sums at the end.
//
// Bound: up to some 150 rows the weights' 2 N K bytes from memory; beyond, 2 M N K operations.
#include "rope_store.cuh"
#include "sample_store.cuh"
#include "split_sum.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// Barriers of the pipeline: full[stage] completes when all bytes are there, empty[stage] when all
// warps that read the stage, in the whole cluster, are done with it; turn[consumer] when it is the
// next to multiply, of those that have tiles of their own.
template <int STAGES, int CONSUMERS>
__device__ __forceinline__ void init_barriers(u32 full, u32 empty, u32 turn, int readers) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) barrier_init(turn + 8 * c, 4);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, readers);
    }
    fence_barrier_init();
  }
}

// A step of the pipeline: what a stage holds of K, the k-th, of a tile and its place in the grid of
// tiles.
struct Step {
  int tile, m, n, k;
};

// The steps of one block: all of K of every `stride`-th tile.
struct Tiles {
  int num_m, num_n, group, stride, k_first, k_last;

  __device__ __forceinline__ int count() const { return num_m * num_n; }

  __device__ __forceinline__ Step step(int tile) const {  // the first of a tile
    if (tile >= count()) return {tile};  // the end
    const int2 at = tile_of_block(tile, num_m, num_n, group);
    return {tile, at.x, at.y, k_first};
  }

  __device__ __forceinline__ void advance(Step& at) const {
    at.k++;
    if (at.k == k_last) at = step(at.tile + stride);
  }
};

// With about 100 sums in each of their threads (three: 64) consumers need more registers than there
// are for all; the producer then is a whole warpgroup, as only such can hand over its share.
__host__ __device__ constexpr int producer_threads(int consumers, int sums, bool split) {
  return consumers > 1 && consumers * sums >= 192 && !split ? 128 : 32;
}

// Steps of 64 elements of K that are loaded and multiplied together: two where a tile is so small
// that waiting for a stage takes a good part of a step's time.
__host__ __device__ constexpr int boxes_per_stage(int rows, int cols) {
  return rows * cols <= 64 * 64 ? 2 : 1;
}

// Whether weights are the first that L2 drops: where no other tile reads them, and with few rows
// also where others do, as those read at about the same time. The other loads have no hint at all:
// to ask for the normal policy makes them slower, as the hint does beside logits on their way out.
template <typename Output> __device__ __forceinline__ bool leave_first(int M, int tiles_m) {
  constexpr int kFewRows = 256;
  return sizeof(Output) == 2 ? M <= kFewRows : tiles_m == 1 && sizeof(Output) != sizeof(float);
}

// `store_rows` is RowStore or what stands in its place, but for the address of its buffer.
template <typename T, int PARTS, int CONSUMERS, int BN, int STAGES, int CLUSTER, bool ALTERNATE,
          bool SPLIT, typename Store>
__device__ __forceinline__ void multiply(const TensorMap& x_map, const TensorMap& weight_map,
                                         Store store_rows, int M, int N, int K, int split,
                                         int group) {
  start_next();
  constexpr int kTakers = ALTERNATE ? CONSUMERS : 1;  // in turn, of a block's tiles
  constexpr int kBM = 64 * PARTS * CONSUMERS / kTakers;
  constexpr int kProducers = producer_threads(CONSUMERS, PARTS * BN / 2, SPLIT);
  constexpr int kThreads = 128 * CONSUMERS + kProducers;
  constexpr u32 kWeightBytes = BN * kTileK * sizeof(T);
  constexpr u32 kXBytes = kBM * kTileK * sizeof(T);
  constexpr u32 kPartBytes = 64 * kTileK * sizeof(T);  // of x
  constexpr u32 kBoxBytes = kWeightBytes + kXBytes;
  constexpr int kBoxes = boxes_per_stage(kBM, BN);
  constexpr int kStages = STAGES / kBoxes;
  constexpr u32 kStageBytes = kBoxes * kBoxBytes;
  constexpr u32 kBufferBytes = SPLIT ? 0 : Store::Pieces::kBytes;  // of a warp
  static_assert(!SPLIT || (!ALTERNATE && CLUSTER == 1));

  extern __shared__ __align__(1024) u8 shared[];  // stages: weight tile, x tile; then the rest
  const u32 stages = smem_address(shared);
  const u32 buffers = stages + kStages * kStageBytes;
  const u32 full = buffers + 4 * CONSUMERS * kBufferBytes;
  const u32 empty = full + 8 * kStages;
  const u32 turn = empty + 8 * kStages;
  const u32 summed = turn + 8 * CONSUMERS;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  const int blocks = SPLIT ? split : CLUSTER;  // that work together
  const int rank = blockIdx.x % blocks;
  const int tiles_m = ceil_div(M, kBM * CLUSTER);
  const int tiles_n = ceil_div(N, BN);
  const int k_steps = ceil_div(K, kBoxes * kTileK);
  const int k_first = SPLIT ? k_steps * rank / split : 0;
  const int k_last = SPLIT ? k_steps * (rank + 1) / split : k_steps;

  const int stride = gridDim.x / blocks;
  const Tiles tiles = {tiles_m, tiles_n, group, stride, k_first, k_last};
  Step step = tiles.step(blockIdx.x / blocks);
  const Step start = step;

  const auto row_of = [&](const Step& at) {
    return (SPLIT ? at.m : at.m * CLUSTER + rank) * kBM;
  };
  const bool hinted = leave_first<typename Store::Output>(M, tiles_m);
  const u64 first_out = evict_first_policy();
  const auto load_weight = [&](int s) {
    const int row = step.n * BN;
    barrier_expect(full + 8 * s, kStageBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; box++) {
      const u32 dst = stages + s * kStageBytes + box * kBoxBytes;
      const int k = (step.k * kBoxes + box) * kTileK;
      if constexpr (CLUSTER == 1) {
        if (hinted) {
          tma_load(dst, weight_map, row, k, full + 8 * s, first_out);
        } else {
          tma_load(dst, weight_map, row, k, full + 8 * s);
        }
      } else {
        const u32 part = dst + rank * (kWeightBytes / CLUSTER);
        const int part_row = row + rank * (BN / CLUSTER);
        constexpr u16 kAll = (1 << CLUSTER) - 1;
        if (hinted) {
          tma_load_multicast(part, weight_map, part_row, k, full + 8 * s, kAll, first_out);
        } else {
          tma_load_multicast(part, weight_map, part_row, k, full + 8 * s, kAll);
        }
      }
    }
  };
  const auto load_x = [&](int s) {
#pragma unroll
    for (int box = 0; box < kBoxes; box++) {
      tma_load(stages + s * kStageBytes + box * kBoxBytes + kWeightBytes, x_map, row_of(step),
               (step.k * kBoxes + box) * kTileK, full + 8 * s);
    }
  };

  const SplitSum<BN> split_sum = {stages, summed, rank, split, min(kBM, M - row_of(step))};
  init_barriers<kStages, CONSUMERS>(full, empty, turn, 4 * (CONSUMERS / kTakers) * CLUSTER);
  if constexpr (SPLIT) split_sum.init();
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  // The first weights are on their way before the kernel that makes x has ended.
  const bool producer = threadIdx.x == 128 * CONSUMERS;
  int loaded = 0;
  for (; producer && loaded < kStages && step.tile < tiles.count(); loaded++, tiles.advance(step)) {
    load_weight(loaded);
  }
  wait_for_previous();

  if (warp >= 4 * CONSUMERS) {
    if constexpr (kProducers == 128) give_registers<40>();
    if (producer) {
      const Step next = step;
      step = start;
      for (int s = 0; s < loaded; s++, tiles.advance(step)) load_x(s);
      step = next;
      int s = 0;
      u32 parity = 0;
      const auto next_empty = [&] {
        barrier_wait(empty + 8 * s, parity);
        const int stage = s;
        if (++s == kStages) {
          s = 0;
          parity ^= 1;
        }
        return stage;
      };
      for (; step.tile < tiles.count(); tiles.advance(step)) {
        const int stage = next_empty();
        load_weight(stage);
        load_x(stage);
      }
      if constexpr (CLUSTER > 1) {  // a block lives while others report to its barriers
        for (int i = 0; i < loaded; i++) next_empty();
      }
    }
    __syncwarp();
  } else {
    if constexpr (kProducers == 128) take_registers<CONSUMERS == 2 ? 232 : 152>();
    store_rows.pieces.use(buffers + warp * kBufferBytes);
    const int warpgroup = __shfl_sync(kFullMask, warp / 4, 0);  // uniform, as wgmma_tile
    const int first_part = ALTERNATE ? 0 : warpgroup * PARTS;  // of 64 rows of the tile
    const int first_row = first_part * 64 + warp % 4 * 16;
    const auto release = [&](int s) {
      if constexpr (CLUSTER == 1) {
        if (lane == 0) barrier_arrive(empty + 8 * s);
      } else {
        if (lane < CLUSTER) barrier_arrive_at(empty + 8 * s, lane);
      }
    };
    int s = 0;
    u32 parity = 0;
    // Stages with tiles of the other consumers.
    const auto skip = [&](int num_tiles) {
      const int to = s + num_tiles * (k_last - k_first);
      s = to % kStages;
      parity ^= to / kStages & 1;
    };
    if constexpr (ALTERNATE) {
      step = tiles.step(step.tile + warpgroup * tiles.stride);
      skip(warpgroup);
    }
    u32 turn_parity = warpgroup == 0;  // the first one's turn begins at once
    for (; step.tile < tiles.count(); step = tiles.step(step.tile + kTakers * tiles.stride)) {
      if constexpr (ALTERNATE) {
        // Waiting for a stage before its turn, a consumer would take the phase before for its own.
        barrier_wait(turn + 8 * warpgroup, turn_parity);
        turn_parity ^= 1;
      }
      const int row0 = row_of(step) + first_row;
      typename Store::Ahead ahead;
      if constexpr (!SPLIT) store_rows.load(ahead, row0, step.n * BN);
      float sum[PARTS][BN / 2] = {};
      int before = 0;
      for (int k = k_first; k < k_last; k++) {
        const u64 weight_tile = wgmma_tile(stages + s * kStageBytes);
        const u64 x_tile = wgmma_further(weight_tile, kWeightBytes + first_part * kPartBytes);
        barrier_wait(full + 8 * s, parity);
        wgmma_fence();
#pragma unroll
        for (int box = 0; box < kBoxes; box++) {
#pragma unroll
          for (int i = 0; i < kTileK / 16; i++) {
            const u32 at = box * kBoxBytes + i * 32;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
              wgmma<T, BN>(sum[part], wgmma_further(x_tile, at + part * kPartBytes),
                           wgmma_further(weight_tile, at));
            }
          }
        }
        wgmma_commit();
        wgmma_wait<1>();  // the products before have been read
        if (k > k_first) release(before);
        before = s;
        if (++s == kStages) {
          s = 0;
          parity ^= 1;
        }
      }
      if constexpr (ALTERNATE) {
        if (lane == 0) barrier_arrive(turn + 8 * ((warpgroup + 1) % CONSUMERS));
      }
      if constexpr (SPLIT) {
        wgmma_wait<0>();
        release(before);
        cluster_arrive();
        cluster_wait();  // all blocks have read their stages
#pragma unroll
        for (int part = 0; part < PARTS; part++) split_sum.send(sum[part], first_row + part * 64);
      } else {
        wgmma_wait<0>();
        release(before);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          if (part > 0) store_rows.load(ahead, row0 + part * 64, step.n * BN);
          store_rows.store(sum[part], ahead, row0 + part * 64, step.n * BN);
        }
        if constexpr (ALTERNATE) skip(CONSUMERS - 1);
      }
    }
    store_rows.pieces.finish();
  }

  if constexpr (SPLIT) {
    if (warp >= 4 * CONSUMERS) {
      cluster_arrive();
      cluster_wait();
    }
    split_sum.template store<T, typename Store::Output, kThreads, Store::kSilu>(
        store_rows.bias, store_rows.residual, store_rows.y, row_of(start), start.n * BN, N,
        store_rows.residual_stride, store_rows.y_stride);
  }
}

template <typename T, typename Out, int PARTS, int CONSUMERS, int BN, int STAGES, int CLUSTER,
          bool ALTERNATE, bool SPLIT, bool SILU>
__global__ void __launch_bounds__(
    128 * CONSUMERS + producer_threads(CONSUMERS, PARTS * BN / 2, SPLIT),
    PARTS * CONSUMERS * BN <= 128 ? 2 : 1)
    matmul_hopper_kernel(const __grid_constant__ TensorMap x_map,
                         const __grid_constant__ TensorMap weight_map,
                         const __grid_constant__ TensorMap y_map, const T* __restrict__ bias,
                         const T* residual, Out* y, int M, int N, int K, int residual_stride,
                         int y_stride, int by_map, int split, int group) {
  const TensorMap* const map = sizeof(Out) == 2 && by_map ? &y_map : nullptr;
  const RowStore<T, Out, BN, SILU> store = {
      bias, residual, y, residual_stride, y_stride, map, {M, SILU ? N / 2 : N}};
  multiply<T, PARTS, CONSUMERS, BN, STAGES, CLUSTER, ALTERNATE, SPLIT>(x_map, weight_map, store, M,
                                                                       N, K, split, group);
}

// The product whose results are heads of q, k and v: see rope_store.cuh.
template <typename T, int PARTS, int CONSUMERS, int BN, int STAGES, int CLUSTER, bool ALTERNATE,
          int HEAD_DIM>
__global__ void __launch_bounds__(
    128 * CONSUMERS + producer_threads(CONSUMERS, PARTS * BN / 2, false),
    PARTS * CONSUMERS * BN <= 128 ? 2 : 1)
    matmul_rope_kv_write_kernel(
        const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
        const __grid_constant__ TensorMap q_map, const T* __restrict__ bias, const i32* positions,
        const i32* token_slots, const i32* block_tables, const float* __restrict__ inv_freq, T* q,
        T* kv_cache, int M, int N, int K, int q_stride, i64 block_stride, int num_heads,
        int num_kv_heads, int block_shift, int max_blocks, int group) {
  const RopeStore<T, BN, HEAD_DIM> store = {
      bias,     positions,    token_slots, block_tables, inv_freq,    q,          kv_cache,
      q_stride, block_stride, num_heads,   num_kv_heads, block_shift, max_blocks, &q_map,
      {M, N}};
  multiply<T, PARTS, CONSUMERS, BN, STAGES, CLUSTER, ALTERNATE, false>(x_map, weight_map, store, M,
                                                                       N, K, 1, group);
}

// The product whose results are logits, of which only a row's best in each tile is wanted: see
// sample_store.cuh.
template <typename T, int PARTS, int CONSUMERS, int BN, int STAGES, int CLUSTER, bool ALTERNATE>
__global__ void __launch_bounds__(
    128 * CONSUMERS + producer_threads(CONSUMERS, PARTS * BN / 2, false),
    PARTS * CONSUMERS * BN <= 128 ? 2 : 1)
    matmul_sample_kernel(const __grid_constant__ TensorMap x_map,
                         const __grid_constant__ TensorMap weight_map, const i32* sample_slots,
                         const i32* sample_positions, const RowParams* row_params,
                         Candidate* candidates, int M, int N, int K, int group) {
  const SampleStore<BN> store = {sample_slots, sample_positions, row_params, candidates,
                                 M,            N,                ceil_div(N, BN)};
  multiply<T, PARTS, CONSUMERS, BN, STAGES, CLUSTER, ALTERNATE, false>(x_map, weight_map, store, M,
                                                                       N, K, 1, group);
}
