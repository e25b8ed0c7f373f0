// y [rows, width] = x [rows, I] W^T for up to 8 * TILES rows, at the speed at which W, in packed tiles of a quantised
// format, is read: from sm_90 on.
//
// One warp of a block has bulk copies bring chunks of KC inputs of M outputs, and TMA the same inputs of x, to shared
// memory, STAGES of them ahead and on into the next tile of outputs; as much of W as fits before the kernel's
// predecessor has ended. Of the others each widens the codes of MT n-tiles of 16 outputs in registers and multiplies
// them by tensor cores; GROUPS of warps share out a chunk, or TURNS of warps take chunks in turn. A packed tile's sums
// are scaled as they are added up, so that products are exact. With GATED, W is a gate matrix over an up matrix and y =
// act(gate) * up. With BIAS, bias [outputs] is added. x lies in boxes of 64 inputs with TMA's 128-byte swizzle; its
// rows from `rows` on are whatever lies there.
#include "tma.cuh"
#include "mma.cuh"
#include "half2.cuh"
#include "tile_sums.cuh"
#include "ring_walk.cuh"
#include FORMAT

constexpr int ROWS = 8 * TILES;  // of x
constexpr int N_TILES = M / 16, SUBTILES = N_TILES / MT, PER_N_TILE = GROUPS * TURNS;  // PER_N_TILE: warps
constexpr int THREADS = SUBTILES * PER_N_TILE * 32;                                  // that multiply
constexpr int K_TILES = I / SPAN, OF_CHUNK = KC / SPAN, CHUNKS = I / KC;  // packed tiles of an n-tile, also of one chunk
constexpr int X_BYTES = ROWS * KC * 2, W_BYTES = N_TILES * OF_CHUNK * PACKED_BYTES;
#include MULTIPLY
constexpr int STAGE = (X_BYTES + W_BYTES + TABLES + 1023) / 1024 * 1024;
constexpr int BLOCK = THREADS + 32 + 32 * SUMMERS;  // threads: also of a warp that copies, and perhaps some that sum up
constexpr int OUTS = GATED ? M / 2 : M;  // what a tile is to y
constexpr int WIDE = ROWS + 1;
// A warp waits for each round of its stages: a barrier tells even rounds from odd ones only.
static_assert(CHUNKS % TURNS == 0 && STAGES % TURNS == 0 && (!SUMMED || STAGES % SUMMERS == 0));

#if __CUDA_ARCH__ >= 900
// The block's part of W and x, chunk by chunk, by one thread.
__device__ inline void produce(const TensorMap* of_x, const unsigned char* weight, unsigned ring, Barrier* full,
                               Barrier* empty, int count, int n_tiles, int rows) {
    auto ask = [&](int n) {  // for W's part of the n-th chunk
        const int stage = n % STAGES, tile = blockIdx.x + n / CHUNKS * gridDim.x;
        const unsigned char* const from = weight + n % CHUNKS * (OF_CHUNK * PACKED_BYTES);
        mbarrier_expect(full + stage, W_BYTES + rows * KC * 2);
#pragma unroll
        for (int i = 0; i < N_TILES; i++) {
            const int half = GATED ? i / (OUTS / 16) : 0, n_tile = tile * (OUTS / 16) + i - half * (OUTS / 16);
            const int there = half * n_tiles + min(n_tile, n_tiles - 1);  // what is past the end is not stored
            bulk_load(ring + stage * STAGE + X_BYTES + i * OF_CHUNK * PACKED_BYTES, from + (long long)there * (K_TILES * PACKED_BYTES),
                      OF_CHUNK * PACKED_BYTES, full + stage);
        }
    };
    auto ask_x = [&](int n) {
        const int stage = n % STAGES, at = n % CHUNKS * KC;
#pragma unroll
        for (int b = 0; b < KC / 64; b++)
            tma_load(ring + stage * STAGE + b * ROWS * 128, of_x, at + b * 64, 0, full + stage);
    };
    fill_ring(count, empty, ask, ask_x);
}

// Work of a warp that only sums: the inputs' sums of its chunks.
__device__ __forceinline__ void sum_up_chunks(uint4* memory, unsigned ring, Barrier* full, Barrier* summed, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int n = warp - THREADS / 32 - 1; n < count; n += SUMMERS) {
        const int at = n % STAGES * STAGE;
        mbarrier_wait(full + n % STAGES, n / STAGES);
        sum_up(ring + at, (unsigned char*)memory + (ring - smem_address(memory)) + at + X_BYTES + W_BYTES);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(summed + n % STAGES);
    }
}

constexpr int PARTIAL = PER_N_TILE, UNEVEN = 1;  // sums of a value; whether the last tile may have fewer outputs
#include "store_tile.cuh"
#endif

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
quantized_gemm(const __grid_constant__ TensorMap of_x, const unsigned char* weight, const T* bias, T* y, int rows,
               int outputs) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES], summed[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    float* sums = (float*)((char*)memory + (ring - smem_address(memory)) + STAGES * STAGE);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int width = GATED ? outputs / 2 : outputs, n_tiles = (width + 15) / 16, tiles = (width + OUTS - 1) / OUTS;
    const int mine = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, SUBTILES * GROUPS);
            mbarrier_init(summed + s, 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (SUMMED && thread >= THREADS + 32) {
        grid_wait();
        sum_up_chunks(memory, ring, full, summed, mine * CHUNKS);
        return;
    }
    if (thread >= THREADS) {
        if (elected()) produce(&of_x, weight, ring, full, empty, mine * CHUNKS, n_tiles, rows);
        return;
    }
    grid_wait();
    const int sub = warp % SUBTILES, turn = warp / SUBTILES / GROUPS;
    int stage = turn, round = 0;
    Barrier* before = empty;  // of the warp's last chunk
    for (int t = 0; t < mine; t++) {
        float sum[MT][TILES][4] = {};
#pragma unroll 1
        for (int c = turn; c < CHUNKS; c += TURNS) {
            const unsigned from = ring + stage * STAGE;
            mbarrier_wait(full + stage, round);
            if (SUMMED) mbarrier_wait(summed + stage, round);
            // The warp's chunk before has been multiplied, so its stage has been read.
            if (TURNS == 1 && c > 0 && lane == 0) mbarrier_arrive(before);
            before = empty + stage;
            stage += TURNS;
            if (stage >= STAGES) stage -= STAGES, round ^= 1;
            const unsigned w_from = from + X_BYTES + sub * MT * OF_CHUNK * PACKED_BYTES;
            multiply(from, w_from, from + X_BYTES + W_BYTES, warp / SUBTILES % GROUPS, sum);
            if (TURNS > 1) release_stage(before);  // the warp's next chunk may be half of the ring away
        }
        if (TURNS == 1) release_stage(before);
        if (t) block_sync<THREADS>(1);  // the values of the tile before have been stored
        keep_sums<WIDE>(sum, sums + (warp / SUBTILES * M + sub * MT * 16 + lane / 4) * WIDE + lane % 4 * 2);
        block_sync<THREADS>(1);
        store(sums, bias, y, (blockIdx.x + t * gridDim.x) * OUTS, width, rows);
    }
#endif
}
