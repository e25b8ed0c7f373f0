// The experts' GEMMs of few pairs each, at the speed at which weights are read: from sm_90 on. w [experts, OUTPUTS, I]
// times the pairs that group.cu has sorted.
//
// With GATED w is gate over up, and y [pairs, OUTPUTS / 2] = weight of the pair * act(gate) * up in sorted order, where
// pair p is row p / TOP of x. Without, y [pairs, OUTPUTS] is in the pairs' own order, and x in sorted order.
//
// A block takes every gridDim.x-th item; an item is a tile of up to ROWS pairs of one expert and M of its outputs. One
// warp has TMA bring chunks of KC inputs of these outputs, STAGES of them ahead and on into the next item; another one
// gathers the same inputs of the pairs; the others multiply both by tensor cores. The down GEMM knows its tiles before
// its predecessor has ended, as they are older than that, and asks for weights until then. Chunks lie in shared memory
// as in pipelined_gemm.cu: boxes of 64 inputs, whose pieces of 16 bytes change places in each row.

constexpr int ROWS = 8 * TILES;                // pairs of an item
constexpr int BOXES = KC / 64;                 // of a chunk
constexpr int STAGE = (M + ROWS) * KC * 2;     // bytes
constexpr int CHUNKS = I / KC;                 // of an item
constexpr int SUBTILES = M / 16;               // of an item, one to a warp
constexpr int GROUPS = SUBTILES > 4 ? 1 : SUBTILES > 2 ? 2 : 4;  // of warps that take turns along a chunk
constexpr int THREADS = SUBTILES * GROUPS * 32;  // that multiply; two more warps bring what they need
constexpr int OUTS = GATED ? M / 2 : M;        // what an item is to y
constexpr int WIDTH = GATED ? OUTPUTS / 2 : OUTPUTS;  // of y
constexpr int BLOCKS = WIDTH / OUTS;           // items of a tile
constexpr int WIDE = ROWS + 1;
#include "tma.cuh"
#include "mma.cuh"
#include "smem_tile.cuh"
#include "ring_walk.cuh"
#include "tile_sums.cuh"

#if __CUDA_ARCH__ >= 900
struct Item {
    int expert, block, start, rows;
};

// Past the first-level cache, which another kernel may have filled before the tiles were there.
struct Tiles {
    const int *ends, *experts, *starts;
    int most;

    __device__ bool find(int number, Item& item) const {
        const int tile = number / BLOCKS;
        if (tile >= most) return false;
        item.expert = __ldcg(experts + tile), item.block = number % BLOCKS;
        if (item.expert < 0) return false;
        item.start = __ldcg(starts + tile);
        item.rows = min(ROWS, __ldcg(ends + item.expert + 1) - item.start);
        return true;
    }
};

__device__ inline float total(const float* sums, int out, int row) {
    float y = 0;
#pragma unroll
    for (int k = 0; k < GROUPS; k++) y += sums[(k * M + out) * WIDE + row];
    return y;
}

// One thread: all items' weights.
__device__ inline void bring_weights(const TensorMap* of_w, const Tiles& tiles, unsigned ring, Barrier* full, Barrier* empty) {
    Item item;
    int n = 0;
    for (int number = blockIdx.x; tiles.find(number, item); number += gridDim.x)
        for (int c = 0; c < CHUNKS; c++, n++) {
            const int stage = n % STAGES, row = item.expert * OUTPUTS + item.block * OUTS;
            if (n >= STAGES) mbarrier_wait(empty + stage, n / STAGES - 1);
            mbarrier_expect(full + stage, M * KC * 2);
#pragma unroll
            for (int b = 0; b < BOXES; b++) {
                const unsigned to = ring + stage * STAGE + b * M * 128;
                tma_load(to, of_w, c * KC + b * 64, row, full + stage);
                if (GATED) tma_load(to + OUTS * 128, of_w, c * KC + b * 64, row + WIDTH, full + stage);
            }
        }
}

// One warp: all items' rows of x. Rows that an item lacks are its first one's, for what nobody stores.
__device__ inline void bring_rows(const T* x, const int* order, const Tiles& tiles, unsigned ring, Barrier* full, Barrier* empty) {
    constexpr int PIECES = KC / 8;  // of a row
    const int lane = threadIdx.x % 32;
    Item item;
    int n = 0;
    for (int number = blockIdx.x; tiles.find(number, item); number += gridDim.x) {
        int mine = item.start + (lane < item.rows ? lane : 0);  // of x
        if (GATED) mine = __ldcg(order + mine) / TOP;
        for (int c = 0; c < CHUNKS; c++, n++) {
            const int stage = n % STAGES;
            if (n >= STAGES) mbarrier_wait(empty + stage, n / STAGES - 1);
            const unsigned to = ring + stage * STAGE + BOXES * M * 128;
#pragma unroll
            for (int i = 0; i < ROWS * PIECES / 32; i++) {
                const int r = (i * 32 + lane) / PIECES, piece = (i * 32 + lane) % PIECES;
                const T* row = x + (long long)__shfl_sync(0xffffffffu, mine, r) * I + c * KC;
                copy_async16(to + (piece / 8 * ROWS + r) * 128 + (piece % 8 ^ r % 8) * 16, row + piece * 8, true);
            }
            arrive_when_copied(full + stage);
        }
    }
    wait_for_copies();
}

// An item's values, once all sums are there.
__device__ inline void store(const float* sums, const Item& item, const int* order, const float* weights, T* y) {
    for (int i = threadIdx.x; i < item.rows * OUTS; i += THREADS) {
        const int row = i / OUTS, out = i % OUTS, at = item.start + row, pair = order[at];
        float value = total(sums, out, row);
        if (GATED) value = gated<T, ACT>(value, total(sums, OUTS + out, row)) * weights[pair];
        y[(long long)(GATED ? at : pair) * WIDTH + item.block * OUTS + out] = from_float<T>(value);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
expert_gemm(const T* x, const __grid_constant__ TensorMap of_w, const int* order, const int* ends, const int* tile_expert,
            const int* tile_start, const float* weights, T* y, int most) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    float* sums = (float*)((char*)memory + (ring - smem_address(memory)) + STAGES * STAGE);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Tiles tiles{ends, tile_expert, tile_start, most};
    if (thread == 0) init_ring(full, empty, THREADS / 32, 32);  // TMA, and the warp that gathers
    __syncthreads();
    if (warp == THREADS / 32) {
        if (GATED) grid_wait();
        if (lane == 0) bring_weights(&of_w, tiles, ring, full, empty);
        return;
    }
    grid_wait();
    if (warp > THREADS / 32) {
        launch_dependents();
        bring_rows(x, order, tiles, ring, full, empty);
        return;
    }
    const int sub = warp % SUBTILES, group = warp / SUBTILES;
    const TileLane place(ring, sub, lane);
    Item item;
    int n = 0;
    for (int number = blockIdx.x; tiles.find(number, item); number += gridDim.x) {
        float sum[1][TILES][4] = {};
#pragma unroll 1
        for (const int start = n, end = n + CHUNKS; n < end; n++) {
            const int stage = n % STAGES;
            mbarrier_wait(full + stage, n / STAGES);
            // What was loaded of the chunk before has been multiplied, so that it has been read.
            if (n > start && lane == 0) mbarrier_arrive(empty + (n - 1) % STAGES);
#pragma unroll
            for (int i = 0; i < KC / 16; i += GROUPS) multiply_step(sum[0], place, stage, i + group);
        }
        release_stage(empty + (n - 1) % STAGES);
        if (number != (int)blockIdx.x) block_sync<THREADS>(1);  // the values of the item before have been stored
        keep_sums<WIDE>(sum, sums + (group * M + sub * 16 + lane / 4) * WIDE + lane % 4 * 2);
        block_sync<THREADS>(1);
        store(sums, item, order, weights, y);
    }
#endif
}
