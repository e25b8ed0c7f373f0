// Grouped GEMMs of quantised experts with few routed tokens each, at the speed at which weights are read: from sm_90
// on. What they take and make is as in quantized_experts.cu: x of ROWS routed tokens of an expert, sorted by group.cu,
// times weights [experts, OUTPUTS, I] in packed tiles. With GATED, y [routed, OUTPUTS / 2] is weight of the routed token *
// act(gate) * up in the order of the tiles; else y [routed, OUTPUTS] is in the routed tokens' own order. With BIAS,
// bias [experts, OUTPUTS] is added.
//
// A unit is two n-tiles of a tile: of gate and of up, or neighbours. A block has a run of units, in the order of the
// tiles, so that it sees few tiles; its warps take them in turn. Each warp has a ring of its own in shared memory,
// STAGES of RUN packed tiles of both n-tiles, which bulk copies fill on into its next units: no warp waits for another,
// and sums stay in registers. One more warp brings the tiles' rows of x, BUFFERS of them ahead. The down GEMM knows its
// tiles before its predecessor has ended, as they are older than that, and asks for weights until then.
#include "tma.cuh"
#include "mma.cuh"
#include "half2.cuh"
#include FORMAT
#include "raw_mma.cuh"

constexpr int ROWS = 8, THREADS = WARPS * 32;  // THREADS: that multiply
constexpr int WIDTH = GATED ? OUTPUTS / 2 : OUTPUTS;   // of y
constexpr int N_TILES = (OUTPUTS + 15) / 16, UNITS = GATED ? WIDTH / 16 : (N_TILES + 1) / 2;  // of an expert; of a tile
constexpr int STEPS = I / SPAN / RUN;                  // stages of a unit
constexpr int PART = RUN * PACKED_BYTES, STAGE = 2 * PART;    // bytes
constexpr int N_TILE_BYTES = I / SPAN * PACKED_BYTES;                // bytes
constexpr int PITCH = I * 2 + 16;  // bytes from row to row: what an instruction reads of eight lies in different banks
constexpr bool X_SUMMED = TOGETHER > 1 && RUN % TOGETHER == 0;  // whether sums of x are
constexpr int SUMS = X_SUMMED ? I : 0;                          // bytes

#if __CUDA_ARCH__ >= 900
struct Tile {
    int expert, rows, row[ROWS];  // row: of y
    float weight[ROWS];
};

// Past the first-level cache, which another kernel may have filled before the tiles were there.
struct Tiles {
    const int *sorted_ids, *offsets, *experts, *starts;

    __device__ int expert(int tile) const { return __ldcg(experts + tile); }
};

// A warp's weights: the stages of its units, one after the other.
struct Weights {
    const unsigned char *all, *from;  // from: what is asked for next
    const Tiles& tiles;
    const unsigned ring;
    Barrier* const full;
    const int end;
    int unit, step, next;  // next: the expert of the unit after

    __device__ Weights(const unsigned char* all, const Tiles& tiles, unsigned ring, Barrier* full, int unit, int end)
        : all(all), from(all), tiles(tiles), ring(ring), full(full), end(end), unit(unit), step(0), next(0) {
        if (unit < end) next = tiles.expert(unit / UNITS);
        find();
    }
    __device__ int n_tile() const { return GATED ? unit % UNITS : unit % UNITS * 2; }
    __device__ void find() {
        if (unit >= end) return;
        from = all + ((long long)next * N_TILES + n_tile()) * N_TILE_BYTES;
        if (unit + WARPS < end) next = tiles.expert((unit + WARPS) / UNITS);
    }
    // Called by a whole warp.
    __device__ void ask(int slot) {
        if (unit >= end) return;
        // Rows past the end are not stored.
        const int other = GATED ? WIDTH / 16 * N_TILE_BYTES : N_TILES % 2 == 0 || n_tile() + 1 < N_TILES ? N_TILE_BYTES : 0;
        if (elected()) {
            mbarrier_expect(full + slot, STAGE);
            bulk_load(ring + slot * STAGE, from, PART, full + slot);
            bulk_load(ring + slot * STAGE + PART, from + other, PART, full + slot);
        }
        from += PART;
        if (++step == STEPS) step = 0, unit += WARPS, find();
    }
};

// One warp: the rows of x of tiles `first` to `last`. Rows that a tile lacks are whatever lies there.
__device__ inline void bring_rows(const T* x, const float* weights, const Tiles& tiles, int first, int last, unsigned to,
                                  T* sums, Tile* x_rows, Barrier* full, Barrier* summed, Barrier* empty) {
    const int lane = threadIdx.x % 32;
    for (int t = first, n = 0; t <= last; t++, n++) {
        const int buffer = n % BUFFERS, expert = tiles.expert(t), start = __ldcg(tiles.starts + t);
        const int rows = min(ROWS, __ldcg(tiles.offsets + expert + 1) - start);
        const int routed_id = lane < rows ? __ldcg(tiles.sorted_ids + start + lane) : 0;
        const float weight = lane < rows ? __ldcg(weights + routed_id) : 0;
        if (n == 0) grid_wait();
        if (n == 0) launch_dependents();
        if (n >= BUFFERS) mbarrier_wait(empty + buffer, n / BUFFERS - 1);
        if (lane < rows) x_rows[buffer].row[lane] = GATED ? start + lane : routed_id, x_rows[buffer].weight[lane] = weight;
        if (lane == 0) x_rows[buffer].expert = expert, x_rows[buffer].rows = rows;
        __syncwarp();
        if (lane == 0) mbarrier_expect(full + buffer, rows * I * 2);
        __syncwarp();
        const long long row = GATED ? routed_id / TOP : start + lane;
        if (lane < rows) bulk_load(to + (buffer * ROWS + lane) * PITCH, x + row * I, I * 2, full + buffer);
        if (!X_SUMMED) continue;
        __syncwarp();
        mbarrier_wait(full + buffer, n / BUFFERS);
        sum_up_inputs<PITCH, I>(to + buffer * ROWS * PITCH, sums + buffer * SUMS / 2);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(summed + buffer);
    }
}

// A stage's. sums_at: the sums of its inputs.
template <class P>
__device__ inline void multiply_run(P like, unsigned from, unsigned x_from, unsigned sums_at, float (&sum)[2][4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (X_SUMMED && sizeof(P)) {
#pragma unroll
        for (int k = 0; k < RUN; k += TOGETHER)
            multiply_together<PITCH, PART>(like, from + k * PACKED_BYTES, x_from + k * SPAN * 2, sums_at + k * SPAN, sum);
    } else {
#pragma unroll
        for (int k = 0; k < RUN; k++) {
            const P packed_tiles[2] = {load_packed_tile(from + k * PACKED_BYTES, lane),
                                       load_packed_tile(from + PART + k * PACKED_BYTES, lane)};
            multiply_tiles<PITCH, false>(packed_tiles, x_from + k * SPAN * 2, sum);
        }
    }
}

// A unit's values. sum: of its two n-tiles.
__device__ inline void store(const float (&sum)[2][4], const Tile& tile, int unit, const T* bias, T* y) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = lane % 4 * 2 + i % 2, out = lane / 4 + i / 2 * 8;
        if (row >= tile.rows) continue;
        const long long to = (long long)tile.row[row] * WIDTH;
        const T* const more = bias + (long long)tile.expert * OUTPUTS;
        if (GATED) {
            const int column = unit % UNITS * 16 + out;
            const float gate = sum[0][i] + (BIAS ? to_float(more[column]) : 0);
            const float up = sum[1][i] + (BIAS ? to_float(more[WIDTH + column]) : 0);
            y[to + column] = from_float<T>(gated<T, ACT>(gate, up) * tile.weight[row]);
            continue;
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int column = (unit % UNITS * 2 + m) * 16 + out;
            if (column >= WIDTH) continue;
            y[to + column] = from_float<T>(sum[m][i] + (BIAS ? to_float(more[column]) * tile.weight[row] : 0));
        }
    }
}

// All of a unit's runs, from slot and round of the warp's ring on.
__device__ __forceinline__ void multiply_unit(Weights& ahead, unsigned ring, Barrier* mine, unsigned x_from, unsigned sums_at,
                                              int& slot, int& round, float (&sum)[2][4]) {
#pragma unroll 1
    for (int s = 0; s < STEPS; s++) {
        mbarrier_wait(mine + slot, round);
        multiply_run(PackedTile(), ring + slot * STAGE, x_from, sums_at + s * RUN * SPAN, sum);
        // All of the warp's loads have been read before a copy writes there again.
        fence_async_proxy();
        __syncwarp();
        ahead.ask(slot);
        x_from += RUN * SPAN * 2;
        if (++slot == STAGES) slot = 0, round++;
    }
}

__device__ __forceinline__ void init_barriers(Barrier* full, Barrier* x_full, Barrier* x_summed, Barrier* x_empty) {
    for (int s = 0; s < WARPS * STAGES; s++) mbarrier_init(full + s, 1);
    for (int b = 0; b < BUFFERS; b++) {
        mbarrier_init(x_full + b, 1);
        mbarrier_init(x_summed + b, 1);
        mbarrier_init(x_empty + b, WARPS);
    }
    fence_mbarrier_init();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
quantized_pipeline(const T* x, const unsigned char* weight, const T* bias, const int* sorted_ids, const int* offsets,
                   const int* tile_expert, const int* tile_start, const float* weights, T* y, int most) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[WARPS * STAGES], x_full[BUFFERS], x_summed[BUFFERS], x_empty[BUFFERS];
    __shared__ Tile x_rows[BUFFERS];
    __shared__ int used;  // tiles
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned rings = smem_address(memory), xs = rings + WARPS * STAGES * STAGE, sums = xs + BUFFERS * ROWS * PITCH;
    if (thread == 0) {
        init_barriers(full, x_full, x_summed, x_empty);
        used = 0;
    }
    __syncthreads();
    if (GATED) grid_wait();
    const Tiles tiles{sorted_ids, offsets, tile_expert, tile_start};
    for (int t = thread; t < most; t += THREADS + 32) {
        const int expert = tiles.expert(t), after = t + 1 < most ? tiles.expert(t + 1) : -1;
        if (expert >= 0 && after < 0) used = t + 1;
    }
    __syncthreads();
    const int block = blockIdx.x, units = used * UNITS, each = units / gridDim.x, more = units % gridDim.x;
    const int begin = block * each + min(block, more), end = begin + each + (block < more);
    const int first = begin / UNITS, last = begin < end ? (end - 1) / UNITS : first - 1;  // tiles
    if (warp == WARPS) {
        T* const to = (T*)((char*)memory + (sums - rings));
        bring_rows(x, weights, tiles, first, last, xs, to, x_rows, x_full, x_summed, x_empty);
        return;
    }
    const unsigned ring = rings + warp * STAGES * STAGE;
    Barrier* const mine = full + warp * STAGES;
    Weights ahead(weight, tiles, ring, mine, begin + warp, end);
    for (int s = 0; s < STAGES; s++) ahead.ask(s);
    grid_wait();
    int tile = first, slot = 0, round = 0;
    // Every warp awaits all of the block's tiles, also those that it has no unit of, and lets go of them.
    auto pass = [&](int to) {
        for (; tile < to; tile++) {
            mbarrier_wait(x_full + (tile - first) % BUFFERS, (tile - first) / BUFFERS);
            release_stage(x_empty + (tile - first) % BUFFERS);
        }
    };
    for (int unit = begin + warp; unit < end; unit += WARPS) {
        pass(unit / UNITS);
        const int buffer = (tile - first) % BUFFERS;
        mbarrier_wait(x_full + buffer, (tile - first) / BUFFERS);
        if (X_SUMMED) mbarrier_wait(x_summed + buffer, (tile - first) / BUFFERS);
        // A lane's row of x, and there its eight of the first 32 inputs.
        const unsigned x_from = xs + (buffer * ROWS + lane % 8) * PITCH + lane / 8 * 16;
        float sum[2][4] = {};  // outputs lane / 4 and 8 below, rows lane % 4 * 2 and + 1
        multiply_unit(ahead, ring, mine, x_from, sums + buffer * SUMS, slot, round, sum);
        store(sum, x_rows[buffer], unit, bias, y);
    }
    pass(last + 1);
#endif
}
