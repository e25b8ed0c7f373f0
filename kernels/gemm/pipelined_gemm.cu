// y [rows, width] = x [rows, I] W^T for up to 8 * TILES rows, at the speed at which W [outputs, I] is read: from sm_90
// on.
//
// One warp has TMA bring chunks of KC inputs of M outputs, and the same inputs of x, to shared memory,
// STAGES of them ahead and on into the next tile of outputs; the others multiply them by tensor cores. As much of W as
// fits is asked for before the kernel's predecessor has ended. With GATED, W is a gate matrix over an up matrix and y =
// act(gate) * up. With BIAS, bias [outputs] is added. A chunk lies in shared memory as boxes of 64 inputs, whose
// 16-byte vectors are permuted in each row (TMA's 128-byte swizzle): the eight rows that an instruction
// reads lie in different banks. Rows of x from `rows` on are whatever lies there: to ask TMA for zeros past x's end
// takes it a fifth longer.
//
// With WHOLE four warps take all 64 rows of x and all of a tile's outputs by Hopper's asynchronous instructions, which
// read x once for WIDTH outputs; warps on their own, each with 16 outputs, read it once each, which from 33 rows on is
// more than shared memory gives.
//
// With UNEVEN the last tile has fewer outputs of y: what TMA brings in addition, zeros or
// the first rows of the up matrix, is multiplied and not stored.

constexpr int ROWS = 8 * TILES;                // of x
constexpr int BOXES = KC / 64;                 // of a chunk
constexpr int STAGE = (M + ROWS) * KC * 2;     // bytes
constexpr int CHUNKS = I / KC;                 // of a tile
constexpr int SUBTILES = WHOLE ? 4 : M / 16;   // of a tile, one to a warp
constexpr int GROUPS = WHOLE || SUBTILES > 4 ? 1 : SUBTILES > 2 ? 2 : 4;  // of warps that take turns along a chunk
constexpr int THREADS = SUBTILES * GROUPS * 32;  // that multiply
constexpr int OUTS = GATED ? M / 2 : M;        // what a tile is to y
constexpr int WIDE = ROWS + 1;
constexpr int PARTS = M > 128 ? 2 : 1, WIDTH = M / PARTS;  // of a tile's outputs, each of one instruction
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "smem_tile.cuh"
#include "ring_walk.cuh"
#include "tile_sums.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int PARTIAL = GROUPS;  // sums of a value
#include "store_tile.cuh"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Sums in registers of a tile whose first output is `first` of y's.
__device__ __forceinline__ void store_sums(const float (&sum)[PARTS][WIDTH / 2], const T* bias, T* y, int first, int width,
                                           int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = first + lane % 4 * 2;
    auto with_bias = [&](float value, int at) { return BIAS ? value + to_float(bias[column + at]) : value; };
    T* to = y + column;
#pragma unroll
    for (int r = 0; r < OUTS / 2; r += 2) {
        const int row = warp * 16 + lane / 4 + r % 4 / 2 * 8;
        Vec<T, 2> pair;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (UNEVEN && column + r / 4 * 8 + i >= width) continue;
            const float value = with_bias(sum[(r + i) / (WIDTH / 2)][(r + i) % (WIDTH / 2)], r / 4 * 8 + i);
            if constexpr (GATED) {
                const int up = r + i + OUTS / 2;
                const float other = with_bias(sum[up / (WIDTH / 2)][up % (WIDTH / 2)], width + r / 4 * 8 + i);
                pair.x[i] = from_float<T>(gated<T, ACT>(value, other));
            } else {
                pair.x[i] = from_float<T>(value);
            }
        }
        T* const there = to + (long long)row * width + r / 4 * 8;
        if constexpr (UNEVEN) {  // a row of y may begin anywhere
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (row < rows && column + r / 4 * 8 + i < width) there[i] = pair.x[i];
        } else {
            if (row < rows) *(Vec<T, 2>*)there = pair;
        }
    }
}

// The block's tiles, `mine` of them, WHOLE.
__device__ inline void whole_tiles(const T* bias, T* y, unsigned ring, Barrier* full, Barrier* empty, int mine, int width,
                                   int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum[PARTS][WIDTH / 2];  // of row warp * 16 + lane / 4 and 8 below, pairs of outputs lane % 4 * 2 of each eight
    for (int t = 0, n = 0; t < mine; t++) {
        const int start = n;
#pragma unroll 1
        for (; n < start + CHUNKS; n++) {
            const unsigned stage = ring + n % STAGES * STAGE;
            mbarrier_wait(full + n % STAGES, n / STAGES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KC / 16; i++) {
                const unsigned long long a = smem_descriptor(stage + (BOXES * M + i / 4 * ROWS) * 128 + i % 4 * 32, 16);
#pragma unroll
                for (int p = 0; p < PARTS; p++)
                    wgmma(T(), sum[p], a, smem_descriptor(stage + (i / 4 * M + p * WIDTH) * 128 + i % 4 * 32, 16),
                          i > 0 || n > start);
            }
            wgmma_commit();
            wgmma_wait<0>();  // with one more chunk under way ptxas would serialize them
            if (lane == 0) mbarrier_arrive(empty + n % STAGES);
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++) fence_registers(sum[p]);
        store_sums(sum, bias, y, (blockIdx.x + t * gridDim.x) * OUTS, width, rows);
    }
}
#endif

#if __CUDA_ARCH__ >= 900
// The warp that has TMA bring `count` chunks.
__device__ __forceinline__ void produce(const TensorMap* of_x, const TensorMap* of_w, unsigned ring, Barrier* full,
                                        Barrier* empty, int count, int width, int rows) {
    auto ask = [&](int n) {  // for W's part of the n-th chunk
        int stage = n % STAGES, tile = blockIdx.x + n / CHUNKS * gridDim.x;
        const int at = n % CHUNKS * KC;
        mbarrier_expect(full + stage, (M + rows) * KC * 2);
#pragma unroll
        for (int b = 0; b < BOXES; b++) {
            unsigned to = ring + stage * STAGE + b * M * 128;
            tma_load(to, of_w, at + b * 64, tile * OUTS, full + stage);
            if (GATED) tma_load(to + OUTS * 128, of_w, at + b * 64, width + tile * OUTS, full + stage);
        }
    };
    auto ask_x = [&](int n) {
        int stage = n % STAGES, at = n % CHUNKS * KC;
#pragma unroll
        for (int b = 0; b < BOXES; b++)
            tma_load(ring + stage * STAGE + (BOXES * M + b * ROWS) * 128, of_x, at + b * 64, 0, full + stage);
    };
    fill_ring(count, empty, ask, ask_x);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
pipelined_gemm(const __grid_constant__ TensorMap of_x, const __grid_constant__ TensorMap of_w, const T* bias, T* y, int rows,
               int outputs) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    float* sums = (float*)((char*)memory + (ring - smem_address(memory)) + STAGES * STAGE);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int width = GATED ? outputs / 2 : outputs, tiles = UNEVEN ? (width + OUTS - 1) / OUTS : outputs / M;
    const int mine = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x, count = mine * CHUNKS;
    if (thread == 0) init_ring(full, empty, THREADS / 32);
    __syncthreads();
    if (warp == THREADS / 32 && elected()) {
        produce(&of_x, &of_w, ring, full, empty, count, width, rows);
    } else if (thread < THREADS) {
        grid_wait();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if constexpr (WHOLE) {
            whole_tiles(bias, y, ring, full, empty, mine, width, rows);
            return;
        }
#endif
        const int sub = warp % SUBTILES, group = warp / SUBTILES;
        const TileLane place(ring, sub, lane);
        for (int t = 0, n = 0; t < mine; t++) {
            float sum[1][TILES][4] = {};
#pragma unroll 1
            for (const int start = n, end = n + CHUNKS; n < end; n++) {
                int stage = n % STAGES;
                mbarrier_wait(full + stage, n / STAGES);
                // The chunk before has been multiplied, so its stage has been read.
                if (n > start && lane == 0) mbarrier_arrive(empty + (n - 1) % STAGES);
#pragma unroll
                for (int i = 0; i < KC / 16; i += GROUPS) multiply_step(sum[0], place, stage, i + group);
            }
            release_stage(empty + (n - 1) % STAGES);
            if (t) block_sync<THREADS>(1);  // the values of the tile before have been stored
            keep_sums<WIDE>(sum, sums + (group * M + sub * 16 + lane / 4) * WIDE + lane % 4 * 2);
            block_sync<THREADS>(1);
            store(sums, bias, y, (blockIdx.x + t * gridDim.x) * OUTS, width, rows);
        }
    }
#endif
}
