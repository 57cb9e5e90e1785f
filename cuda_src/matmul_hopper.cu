// y = x weight^T (+ bias) (+ residual), or silu(gate) * up, at the speed of Hopper's tensor cores
// (sm_90a).
//
// Operands: matmul_tile.cuh; x and weight come as tensor maps, read in boxes of 64 elements of K.
// A tile of y has 64 * PARTS rows for each of CONSUMERS warpgroups, and BN weight rows. A producer
// warp fills STAGES buffers in shared memory by TMA; the consumers multiply from there by wgmma and
// store their rows, while the producer is already loading for the next tile. Blocks stay and take
// tile after tile.
//
// With ALTERNATE each consumer has tiles of its own, of 64 * PARTS rows: one stores while another
// multiplies.
//
// CLUSTER neighbouring tiles along M are worked on by a cluster: each block loads a part of the
// weights that they have in common, for all of them. With SPLIT the `split` blocks of a cluster
// share out K of the same tile, and add up the sums at the end.
//
// Bound: up to some 150 rows the weights' 2 N K bytes from memory; beyond, 2 M N K operations.
#include "matmul_tile.cuh"
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

// A step of the pipeline: 64 elements of K, the k-th, of a tile and its place in the grid of tiles.
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

// How a warp stores its 16 rows of a tile: in pieces of columns that are put together in shared
// memory, so that whole lines are written.
template <typename T, typename Out, int BN, bool SILU> struct RowStore {
  static constexpr int kOperands = SILU ? 2 : 1;
  static constexpr int kCols = BN / kOperands;  // of y
  static constexpr int kMaxPiece = 128 / sizeof(Out);
  static constexpr int kPiece = kCols % kMaxPiece == 0 ? kMaxPiece : kCols % 32 == 0 ? 32 : 16;
  static constexpr int kPieces = kCols / kPiece;
  static constexpr int kVec = 16 / sizeof(Out);
  static constexpr u32 kPitch = kPiece * sizeof(Out) + 16;  // lanes of a fragment hit all banks
  static constexpr u32 kBytes = 16 * kPitch;  // of shared memory for each warp
  using Residual = u32[kPiece / 8][2];

  const T* bias;
  const T* residual;
  Out* y;
  int M, num_cols;
  i64 residual_stride, y_stride;
  u32 buffer;

  // Adds the bias to the sums of 16 rows. The first is for weight row `weight_row`.
  __device__ __forceinline__ void add_bias(float (&sum)[BN / 2], int weight_row) const {
    const int num_rows = num_cols * kOperands;
    const int first = weight_row + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
      const int row = first + 8 * j;
      if (row < num_rows) {
        const bool both = row + 1 < num_rows;
        const float2 b = load2(bias + row, both, both);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          sum[4 * j + 2 * half] += b.x;
          sum[4 * j + 2 * half + 1] += b.y;
        }
      }
    }
  }

  // The residual's elements that belong to this lane's sums of a piece.
  __device__ __forceinline__ void load(Residual& add, int row0, int col0) const {
    const int row = row0 + threadIdx.x % kWarpSize / 4;
    const int col = col0 + threadIdx.x % 4 * 2;
    const T* const p = residual + row * residual_stride + col;
    if (residual_stride % 2 == 0 && row0 + 16 <= M && col0 + kPiece <= num_cols) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < kPiece / 8; j++) {
          add[j][half] = *reinterpret_cast<const u32*>(p + 8 * half * residual_stride + 8 * j);
        }
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int j = 0; j < kPiece / 8; j++) {
        add[j][half] = 0;
        if (row + 8 * half < M && col + 8 * j < num_cols) {
          const T* const from = p + 8 * half * residual_stride + 8 * j;
          const float2 v = load2(from, col + 8 * j + 1 < num_cols, false);
          add[j][half] = pack2<T>(v.x, v.y);
        }
      }
    }
  }

  template <int PIECE>
  __device__ __forceinline__ void add_residual(float (&sum)[BN / 2], const Residual& add) const {
#pragma unroll
    for (int j = 0; j < kPiece / 8; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = 4 * (PIECE * (kPiece / 8) + j) + 2 * half;
        const float2 r = unpack2<T>(add[j][half]);
        sum[i] += r.x;
        sum[i + 1] += r.y;
      }
    }
  }

  template <int PIECE>
  __device__ __forceinline__ void store(const float (&sum)[BN / 2], int row0, int col0) const {
    const int lane = threadIdx.x % kWarpSize;
    const u32 mine = buffer + lane / 4 * kPitch + lane % 4 * (2 * sizeof(Out));
#pragma unroll
    for (int j = 0; j < kPiece / 8; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = 4 * (PIECE * (kPiece / 8) + j) * kOperands + 2 * half;
        float2 v = {sum[i], sum[i + 1]};
        if constexpr (SILU) v = {silu(v.x) * sum[i + 4], silu(v.y) * sum[i + 5]};
        const u32 to = mine + 8 * half * kPitch + j * (8 * sizeof(Out));
        if constexpr (sizeof(Out) == 4) {
          store_shared(to, v);
        } else {
          store_shared(to, pack2<Out>(v.x, v.y));
        }
      }
    }
    __syncwarp();
    constexpr int kVecs = kPiece / kVec;  // in a row
    constexpr int kRows = kWarpSize / kVecs;  // at a time
    const int row = lane / kVecs;
    const int col = col0 + lane % kVecs * kVec;
    const u32 from = buffer + row * kPitch + lane % kVecs * 16;
    Out* const to = y + (row0 + row) * y_stride + col;
    const bool whole = reinterpret_cast<u64>(y) % 16 == 0 && y_stride % kVec == 0 &&
                       col + kVec <= num_cols;
    float4 v[16 / kRows];
#pragma unroll
    for (int i = 0; i < 16 / kRows; i++) v[i] = load_shared_4(from + i * kRows * kPitch);
#pragma unroll
    for (int i = 0; i < 16 / kRows; i++) {
      if (row0 + row + i * kRows >= M) break;
      Out* const p = to + i * kRows * y_stride;
      if (whole) {
        *reinterpret_cast<float4*>(p) = v[i];
      } else {
        const Vec<Out, kVec> out = *reinterpret_cast<const Vec<Out, kVec>*>(&v[i]);
#pragma unroll
        for (int e = 0; e < kVec; e++) {
          if (col + e < num_cols) p[e] = out.v[e];
        }
      }
    }
    __syncwarp();
  }

  // Stores the pieces from PIECE on of 16 rows; `add` is the first one's residual, if there is one.
  template <int PIECE = 0>
  __device__ __forceinline__ void store_all(float (&sum)[BN / 2], Residual& add, int row0,
                                            int col0) const {
    if constexpr (PIECE < kPieces) {
      Residual next;
      if (!SILU && residual != nullptr) {
        if constexpr (PIECE + 1 < kPieces) load(next, row0, col0 + (PIECE + 1) * kPiece);
        if constexpr (!SILU) add_residual<PIECE>(sum, add);
      }
      store<PIECE>(sum, row0, col0 + PIECE * kPiece);
      store_all<PIECE + 1>(sum, next, row0, col0);
    }
  }
};

// With about 100 sums in each of their threads two consumers need more registers than there are for
// all; the producer then is a whole warpgroup, as only such can hand over its share.
__host__ __device__ constexpr int producer_threads(int consumers, int sums, bool split) {
  return consumers == 2 && sums >= 96 && !split ? 128 : 32;
}

template <typename T, typename Out, int PARTS, int CONSUMERS, int BN, int STAGES, int CLUSTER,
          bool ALTERNATE, bool SPLIT, bool SILU>
__global__ void __launch_bounds__(
    128 * CONSUMERS + producer_threads(CONSUMERS, PARTS * BN / 2, SPLIT),
    PARTS * CONSUMERS * BN <= 128 ? 2 : 1)
    matmul_hopper_kernel(const __grid_constant__ TensorMap x_map,
                         const __grid_constant__ TensorMap weight_map, const T* __restrict__ bias,
                         const T* residual, Out* y, int M, int N, int K, int residual_stride,
                         int y_stride, int split, int group) {
  start_next();
  constexpr int kTakers = ALTERNATE ? CONSUMERS : 1;  // in turn, of a block's tiles
  constexpr int kBM = 64 * PARTS * CONSUMERS / kTakers;
  constexpr int kProducers = producer_threads(CONSUMERS, PARTS * BN / 2, SPLIT);
  constexpr int kThreads = 128 * CONSUMERS + kProducers;
  constexpr u32 kWeightBytes = BN * kTileK * sizeof(T);
  constexpr u32 kXBytes = kBM * kTileK * sizeof(T);
  constexpr u32 kStageBytes = kWeightBytes + kXBytes;
  using Rows = RowStore<T, Out, BN, SILU>;
  static_assert(!SPLIT || (!ALTERNATE && CLUSTER == 1));

  extern __shared__ __align__(1024) u8 shared[];  // stages: weight tile, x tile; then the rest
  const u32 stages = smem_address(shared);
  const u32 buffers = stages + STAGES * kStageBytes;
  const u32 full = buffers + 4 * CONSUMERS * Rows::kBytes;
  const u32 empty = full + 8 * STAGES;
  const u32 turn = empty + 8 * STAGES;
  const u32 summed = turn + 8 * CONSUMERS;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  const int blocks = SPLIT ? split : CLUSTER;  // that work together
  const int rank = blockIdx.x % blocks;
  const int tiles_m = ceil_div(M, kBM * CLUSTER);
  const int tiles_n = ceil_div(N, BN);
  const int k_tiles = ceil_div(K, kTileK);
  const int k_first = SPLIT ? k_tiles * rank / split : 0;
  const int k_last = SPLIT ? k_tiles * (rank + 1) / split : k_tiles;

  const int stride = gridDim.x / blocks;
  const Tiles tiles = {tiles_m, tiles_n, group, stride, k_first, k_last};
  Step step = tiles.step(blockIdx.x / blocks);
  const Step start = step;

  const auto row_of = [&](const Step& at) {
    return (SPLIT ? at.m : at.m * CLUSTER + rank) * kBM;
  };
  // Weights that no other tile reads leave L2 first; beside float32 results (logits) that is slower.
  // Other loads have no hint at all: to ask for the normal policy makes them slower, too.
  const bool once = tiles_m == 1 && sizeof(Out) == 2;
  const u64 first_out = evict_first_policy();
  const auto load_weight = [&](int s) {
    const u32 dst = stages + s * kStageBytes;
    const int row = step.n * BN;
    barrier_expect(full + 8 * s, kStageBytes);
    const int k = step.k * kTileK;
    if constexpr (CLUSTER == 1) {
      if (once) {
        tma_load(dst, weight_map, row, k, full + 8 * s, first_out);
      } else {
        tma_load(dst, weight_map, row, k, full + 8 * s);
      }
    } else {
      const u32 part = dst + rank * (kWeightBytes / CLUSTER);
      const int part_row = row + rank * (BN / CLUSTER);
      constexpr u16 kAll = (1 << CLUSTER) - 1;
      if (once) {
        tma_load_multicast(part, weight_map, part_row, k, full + 8 * s, kAll, first_out);
      } else {
        tma_load_multicast(part, weight_map, part_row, k, full + 8 * s, kAll);
      }
    }
  };
  const auto load_x = [&](int s) {
    tma_load(stages + s * kStageBytes + kWeightBytes, x_map, row_of(step), step.k * kTileK,
             full + 8 * s);
  };

  const SplitSum<BN> split_sum = {stages, summed, rank, split, min(kBM, M - row_of(step))};
  init_barriers<STAGES, CONSUMERS>(full, empty, turn, 4 * (CONSUMERS / kTakers) * CLUSTER);
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
  for (; producer && loaded < STAGES && step.tile < tiles.count(); loaded++, tiles.advance(step)) {
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
        if (++s == STAGES) {
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
    if constexpr (kProducers == 128) take_registers<232>();
    const Rows rows = {bias, residual, y, M, N / Rows::kOperands, residual_stride, y_stride,
                       buffers + warp * Rows::kBytes};
    const int warpgroup = warp / 4;
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
      s = to % STAGES;
      parity ^= to / STAGES & 1;
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
      float sum[PARTS][BN / 2] = {};
      int before = 0;
      for (int k = k_first; k < k_last; k++) {
        barrier_wait(full + 8 * s, parity);
        const u32 weight_tile = stages + s * kStageBytes;
        const u32 x_tile = weight_tile + kWeightBytes + first_part * (64 * kTileK * sizeof(T));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTileK / 16; i++) {
#pragma unroll
          for (int part = 0; part < PARTS; part++) {
            wgmma<T, BN>(sum[part],
                         wgmma_tile(x_tile + part * (64 * kTileK * sizeof(T)) + i * 32),
                         wgmma_tile(weight_tile + i * 32));
          }
        }
        wgmma_commit();
        wgmma_wait<1>();  // the products before have been read
        if (k > k_first) release(before);
        before = s;
        if (++s == STAGES) {
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
        const int row0 = row_of(step) + first_row;
        const int col0 = step.n * (BN / Rows::kOperands);
        typename Rows::Residual add;
        if (!SILU && residual != nullptr) rows.load(add, row0, col0);
        wgmma_wait<0>();
        release(before);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          if (!SILU && part > 0 && residual != nullptr) rows.load(add, row0 + part * 64, col0);
          if (bias != nullptr) rows.add_bias(sum[part], step.n * BN);
          rows.template store_all<>(sum[part], add, row0 + part * 64, col0);
        }
        if constexpr (ALTERNATE) skip(CONSUMERS - 1);
      }
    }
  }

  if constexpr (SPLIT) {
    if (warp >= 4 * CONSUMERS) {
      cluster_arrive();
      cluster_wait();
    }
    split_sum.template store<T, Out, kThreads, SILU>(bias, residual, y, row_of(start),
                                                     start.n * BN, N, residual_stride, y_stride);
  }
}
