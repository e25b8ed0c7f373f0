// y [rows, width] = x [rows, I] W^T for more rows than quantized_gemm.cu takes well, W in packed tiles of a quantised
// format: by Hopper's asynchronous tensor-core instructions, for sm_90a alone.
//
// A block has a tile of M outputs and up to ROWS rows. With SPLIT above 1, the blocks of a cluster have one tile and
// each a part of the inputs, and they add their sums up through each other's shared memory.
//
// One warp has bulk copies bring chunks of KC inputs of W, and TMA the same inputs of x, to shared memory, STAGES
// ahead; as much of W as fits before the kernel's predecessor has ended. Of GROUPS warpgroups each takes 64 outputs: a
// warp makes the weights of its n-tile of 16 in registers while the matmuls of those before are under way. So x is read
// from the second-level cache once for M outputs, and from shared memory once for 64. With GATED, W is a gate matrix
// over an up matrix and y = act(gate) * up. With BIAS, bias [outputs] is added. x lies in boxes of 64 inputs of
// `height` rows with TMA's 128-byte swizzle; rows below that are whatever lies there.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "half2.cuh"
#include FORMAT
#include "ring_walk.cuh"

constexpr int OVER = 1;  // blocks of a cluster that have W in common
constexpr int M = 64 * GROUPS, N_TILES = M / 16, THREADS = 128 * GROUPS;  // that multiply
constexpr int K_TILES = I / SPAN, OF_CHUNK = KC / SPAN, CHUNKS = I / KC / SPLIT;  // packed tiles of an n-tile, also of one chunk
constexpr int X_BYTES = ROWS * KC * 2, W_BYTES = N_TILES * OF_CHUNK * PACKED_BYTES;
constexpr int STAGE = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr int OUTS = GATED ? M / 2 : M;  // what a tile is to y
// Registers of a thread at the start, of one that copies, and of one that multiplies. A block has none but those of the
// start: a warp that asks for more than others have given back waits forever.
constexpr int AT_START = 65536 / (THREADS + 128) / 8 * 8, TO_COPY = 24;
constexpr int REGISTERS = GROUPS == 4 ? 112 : GROUPS == 3 ? 160 : 240;
static_assert(GROUPS * REGISTERS + TO_COPY <= (GROUPS + 1) * AT_START);
constexpr int PITCH = M + 4;             // of the sums [ROWS, M] f32, where the chunks were: without bank conflicts

#include "wgmma_tile.cuh"
#include "wgmma_tiles.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The tile's part of W and x, chunk by chunk, by one thread.
__device__ inline void produce(const TensorMap* of_x, const unsigned char* weight, unsigned ring, Barrier* full,
                               Barrier* empty, const Tile& tile, int n_tiles, int height) {
    const unsigned char* const part = weight + tile.rank * CHUNKS * (OF_CHUNK * PACKED_BYTES);
    auto ask = [&](int n) {  // for W's part of the n-th chunk
        const int stage = n % STAGES;
        mbarrier_expect(full + stage, W_BYTES + height * KC * 2);
#pragma unroll
        for (int i = 0; i < N_TILES; i++) {
            const int half = GATED ? i / (OUTS / 16) : 0, n_tile = tile.first / 16 + i - half * (OUTS / 16);
            const int there = half * n_tiles + min(n_tile, n_tiles - 1);  // what is past the end is not stored
            bulk_load(ring + stage * STAGE + X_BYTES + i * OF_CHUNK * PACKED_BYTES,
                      part + (long long)there * (K_TILES * PACKED_BYTES) + n * (OF_CHUNK * PACKED_BYTES), OF_CHUNK * PACKED_BYTES,
                      full + stage);
        }
    };
    auto ask_x = [&](int n) {
        const int stage = n % STAGES, at = (tile.rank * CHUNKS + n) * KC;
#pragma unroll
        for (int b = 0; b < KC / 64; b++) {
            const unsigned to = ring + stage * STAGE + b * ROWS * 128;
            tma_load(to, of_x, at + b * 64, tile.row, full + stage);
        }
    };
    fill_ring(CHUNKS, empty, ask, ask_x);
}

// The sums of a warpgroup's 64 outputs.
__device__ inline void multiply(unsigned ring, Barrier* full, Barrier* empty, float (&sum)[1][ROWS / 2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned a[2][2][4];
#pragma unroll 1
    for (int n = 0; n < CHUNKS; n++) {
        const unsigned stage = ring + n % STAGES * STAGE;
        mbarrier_wait(full + n % STAGES, n / STAGES);
        multiply_chunk(stage, warp, lane, n > 0, a, sum, [&] {
            // The chunk before has been multiplied, so its stage has been read.
            Barrier* const before = empty + (n + STAGES - 1) % STAGES;
            if (n > 0 && lane == 0) mbarrier_arrive(before);
        });
    }
    wgmma_wait<0>();
    fence_registers(sum[0]);
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
quantized_wgmma(const __grid_constant__ TensorMap of_x, const unsigned char* weight, const T* bias, T* y, int rows,
                int outputs, int height) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    float* const sums = (float*)((char*)memory + (ring - smem_address(memory)));
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int width = GATED ? outputs / 2 : outputs;
    const int columns = (width + OUTS - 1) / OUTS;
    const Tile tile(blockIdx.x / SPLIT, (rows + height - 1) / height, columns, height);
    if (thread == 0) init_ring(full, empty, THREADS / 32);
    __syncthreads();
    if (thread >= THREADS) {
        set_registers<TO_COPY>(false);
        if (warp == THREADS / 32 && elected()) produce(&of_x, weight, ring, full, empty, tile, (width + 15) / 16, height);
    } else {
        set_registers<REGISTERS>(true);
        grid_wait();
        float sum[1][ROWS / 2];
        multiply(ring, full, empty, sum);
        block_sync<THREADS>(1);  // the last chunks have been read
        float* const here = sums + lane % 4 * 2 * PITCH + warp * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < ROWS / 2; r++) here[(r / 4 * 8 + r % 2) * PITCH + r % 4 / 2 * 8] = sum[0][r];
        if constexpr (SPLIT > 1)
            cluster_sync();
        else
            block_sync<THREADS>(1);
        store(sums, bias, y, tile, width, min(height, rows - tile.row));
        if constexpr (SPLIT > 1) cluster_sync();  // no block leaves while another may read or write there
    }
#endif
}
