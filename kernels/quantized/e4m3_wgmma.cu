// y [rows, width] = x [rows, I] W^T of numbers in e4m3, by Hopper's asynchronous tensor-core instructions of 8 bits: for
// sm_90a alone. W lies in pieces (e4m3.cuh), and each 128 inputs of an output share a scale; x lies as e4m3_rows.cu
// leaves it, with a scale for each 128 inputs of a row.
//
// A block has a tile of 64 GROUPS outputs and up to ROWS rows. With SPLIT above 1, the blocks of a cluster have one tile
// and each a part of the inputs, and they add their sums up through each other's shared memory. Else a cluster has SHARE
// tiles side by side of each of OVER runs of rows: of x that SHARE blocks have in common, and of W that OVER blocks do,
// each brings a part to all of them. For the second-level cache, not the tensor cores, bounds tiles that are read alone.
//
// One warp has copies bring chunks of 128 inputs of W, of x and of x's scales to shared memory, STAGES ahead; as much of
// W as fits before the kernel's predecessor has ended. Of GROUPS warpgroups each takes 64 outputs. A piece's words are
// the first operand as they are. Tensor cores keep about 14 bits of such a sum (DeepSeek-V3, arXiv 2412.19437, 3.3.2),
// so that those of each 128 inputs are scaled and added up in f32. With GATED, W is a gate matrix over an up matrix and
// y = act(gate) * up. With BIAS, bias [outputs] is added. Rows of x past `height` are whatever lies there.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "pairs.cuh"
#include "e4m3.cuh"

constexpr int KC = 128, M = 64 * GROUPS, STRIPS = M / 16, THREADS = 128 * GROUPS;
constexpr int PIECES = I / SPAN, OF_CHUNK = KC / SPAN, CHUNKS = I / KC / SPLIT;  // pieces of a strip, also of one chunk
constexpr int X_BYTES = ROWS * KC, W_BYTES = STRIPS * OF_CHUNK * PIECE;
constexpr int STAGE = (X_BYTES + W_BYTES + ROWS * 4 + 1023) / 1024 * 1024;
constexpr int OUTS = GATED ? M / 2 : M;  // what a tile is to y
// Registers of a thread at the start, of one that copies, and of one that multiplies: quantized_wgmma.cu says why.
constexpr int AT_START = 65536 / (THREADS + 128) / 8 * 8, TO_COPY = 24;
constexpr int REGISTERS = GROUPS == 4 ? 112 : GROUPS == 3 ? 160 : 240;
static_assert(GROUPS * REGISTERS + TO_COPY <= (GROUPS + 1) * AT_START);
constexpr int PITCH = M + 4;  // of the sums [ROWS, M] f32, where the chunks were: without bank conflicts
static_assert(SPLIT == 1 || SHARE * OVER == 1);
#include "wgmma_tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The tile's part of W, of x and of its scales [I / 128, pitch], chunk by chunk, by one thread.
__device__ inline void produce(const TensorMap* of_x, const float* x_scales, const unsigned char* weight, unsigned ring,
                               Barrier* full, Barrier* empty, const Tile& tile, int strips, int height, int pitch) {
    const int column = cluster_rank() % SHARE, over = cluster_rank() / SHARE % OVER;  // this block's place, if they share
    auto ask = [&](int n) {  // for W's part of the n-th chunk
        const int stage = n % STAGES;
        mbarrier_expect(full + stage, W_BYTES + height * (KC + 4));
#pragma unroll
        for (int j = 0; j < STRIPS / OVER; j++) {
            const int i = over * (STRIPS / OVER) + j;
            const int half = GATED ? i / (OUTS / 16) : 0, strip = tile.first / 16 + i - half * (OUTS / 16);
            const int there = half * strips + min(strip, strips - 1);  // what is past the end is not stored
            const unsigned to = ring + stage * STAGE + X_BYTES + i * OF_CHUNK * PIECE;
            const unsigned char* const from =
                weight + ((long long)there * PIECES + (tile.rank * CHUNKS + n) * OF_CHUNK) * PIECE;
            if constexpr (OVER > 1)
                bulk_load_multicast(to, from, OF_CHUNK * PIECE, full + stage, (1 << column) * (SHARE > 1 ? 5 : 3));
            else
                bulk_load(to, from, OF_CHUNK * PIECE, full + stage);
        }
    };
    auto ask_x = [&](int n) {
        const int stage = n % STAGES, chunk = tile.rank * CHUNKS + n, part = height / SHARE;
        const unsigned to = ring + stage * STAGE;
        const int input = chunk * (KC / 2);  // in elements of two bytes
        if constexpr (SHARE > 1)
            tma_load_multicast(to + column * part * KC, of_x, input, tile.row + column * part, full + stage, 3 << 2 * over);
        else
            tma_load(to, of_x, input, tile.row, full + stage);
        bulk_load(to + X_BYTES + W_BYTES, x_scales + (long long)chunk * pitch + tile.row, height * 4, full + stage);
    };
#pragma unroll 1
    for (int n = 0; n < STAGES && n < CHUNKS; n++) ask(n);
    grid_wait();
    launch_dependents();
#pragma unroll 1
    for (int n = 0; n < STAGES && n < CHUNKS; n++) ask_x(n);
#pragma unroll 1
    for (int n = STAGES; n < CHUNKS; n++) {
        mbarrier_wait(empty + n % STAGES, n / STAGES - 1);
        ask(n);
        ask_x(n);
    }
}

constexpr int HALF = ROWS / 2;  // of the rows, whose sums are scaled together

// A chunk's part of W of this warp, as the first operand, and the scales of outputs lane / 4 and 8 below.
struct Chunk {
    unsigned words[OF_CHUNK][4];
    float2 by;

    __device__ inline void load(unsigned stage) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const unsigned from = stage + X_BYTES + warp * OF_CHUNK * PIECE;
#pragma unroll
        for (int p = 0; p < OF_CHUNK; p++) {
            const uint4 x = load_shared16(from + p * PIECE + lane * 16);
            words[p][0] = x.x, words[p][1] = x.y, words[p][2] = x.z, words[p][3] = x.w;
        }
        by = load_shared_floats(from + 512 + lane / 4 * 8);
    }
    // part = this times rows `half` * HALF to half * HALF + HALF - 1 of x, asynchronously.
    __device__ inline void multiply(unsigned stage, int half, float (&part)[HALF / 2]) const {
        fence_registers(part);
        wgmma_fence();
#pragma unroll
        for (int p = 0; p < OF_CHUNK; p++)
            wgmma_e4m3(part, words[p], smem_descriptor(stage + half * HALF * KC + p * SPAN, 16), p > 0);
        wgmma_commit();
    }
    // sum += part, by the scales of both.
    __device__ inline void add(unsigned stage, int half, float (&part)[HALF / 2], float* sum) const {
        fence_registers(part);
        const unsigned scales = stage + X_BYTES + W_BYTES + (half * HALF + threadIdx.x % 4 * 2) * 4;
#pragma unroll
        for (int r = 0; r < HALF / 2; r += 4) {
            const float2 of_x = load_shared_floats(scales + r * 8);  // of row 2 r and the next
            sum[r] += part[r] * (of_x.x * by.x), sum[r + 1] += part[r + 1] * (of_x.y * by.x);
            sum[r + 2] += part[r + 2] * (of_x.x * by.y), sum[r + 3] += part[r + 3] * (of_x.y * by.y);
        }
    }
};

// A warp has read its part of a stage, which the cluster's blocks that share operands fill, each a part.
__device__ inline void release(Barrier* empty) {
    const int lane = threadIdx.x % 32, first = SPLIT > 1 ? cluster_rank() : 0;
    fence_async_proxy();
    __syncwarp();
    mbarrier_arrive_at_if(lane < SHARE * OVER, empty, first + lane % (SHARE * OVER));
}

// The sums of a warpgroup's 64 outputs: of outputs lane / 4 of the warp's 16 and 8 below, pairs of rows lane % 4 * 2 of
// each eight. Tensor cores have one half of the rows under way while the other's sums are scaled.
__device__ inline void multiply(unsigned ring, Barrier* full, Barrier* empty, float (&sum)[ROWS / 2]) {
    float low[HALF / 2] = {}, high[HALF / 2] = {};
    Chunk chunks[2];
#pragma unroll
    for (int r = 0; r < ROWS / 2; r++) sum[r] = 0;
    auto load = [&](int n, Chunk& chunk) {
        mbarrier_wait(full + n % STAGES, n / STAGES);
        chunk.load(ring + n % STAGES * STAGE);
    };
    auto step = [&](int n, const Chunk& chunk, Chunk& next) {
        const unsigned stage = ring + n % STAGES * STAGE;
        chunk.multiply(stage, 0, low);
        chunk.multiply(stage, 1, high);
        if (n + 1 < CHUNKS) load(n + 1, next);
        wgmma_wait<1>();
        chunk.add(stage, 0, low, sum);
        wgmma_wait<0>();
        chunk.add(stage, 1, high, sum + HALF / 2);
        release(empty + n % STAGES);
    };
    load(0, chunks[0]);
#pragma unroll 1
    for (int n = 0; n + 1 < CHUNKS; n += 2) {
        step(n, chunks[0], chunks[1]);
        step(n + 1, chunks[1], chunks[0]);
    }
    if constexpr (CHUNKS % 2) step(CHUNKS - 1, chunks[0], chunks[1]);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
e4m3_wgmma(const __grid_constant__ TensorMap of_x, const float* x_scales, const unsigned char* weight, const T* bias, T* y,
           int rows, int outputs, int height, int pitch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    float* const sums = (float*)((char*)memory + (ring - smem_address(memory)));
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int width = GATED ? outputs / 2 : outputs;
    const Tile tile((rows + height - 1) / height, height);
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, THREADS / 32 * SHARE * OVER);
        }
        fence_mbarrier_init();
    }
    if constexpr (SHARE * OVER > 1)
        cluster_sync();  // the others' barriers are there, too
    else
        __syncthreads();
    if (thread >= THREADS) {
        set_registers<TO_COPY>(false);
        if (thread == THREADS) produce(&of_x, x_scales, weight, ring, full, empty, tile, (width + 15) / 16, height, pitch);
    } else {
        set_registers<REGISTERS>(true);
        grid_wait();
        float sum[ROWS / 2];
        multiply(ring, full, empty, sum);
        block_sync<THREADS>(1);  // the last chunks have been read
        float* const here = sums + lane % 4 * 2 * PITCH + warp * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < ROWS / 2; r++) here[(r / 4 * 8 + r % 2) * PITCH + r % 4 / 2 * 8] = sum[r];
        if constexpr (SPLIT > 1)
            cluster_sync();
        else
            block_sync<THREADS>(1);
        store(sums, bias, y, tile, width, min(height, rows - tile.row));
        if constexpr (SPLIT * SHARE * OVER > 1) cluster_sync();  // no block leaves while another may read or write there
    }
#endif
}
