// Grouped GEMMs of quantised experts with some routed tokens each, by Hopper's asynchronous tensor-core instructions of
// 16 bits: for sm_90a alone. x [routed, I] is in the order of group.cu, as gather_routed.cu makes it, so that the
// routed tokens of an expert are rows side by side. Weights are [experts, OUTPUTS, I] in packed tiles of a quantised
// format. With GATED, y [routed, OUTPUTS / 2] is weight of the routed token * act(gate) * up in that order; else y
// [routed, OUTPUTS] is in the routed tokens' own order. With BIAS, bias [experts, OUTPUTS] is added, times the routed
// token's weight where x has it in already.
//
// A tile has up to ROWS routed tokens of one expert and M outputs of the weights (expert_walk.cuh). One warp has bulk
// copies bring chunks of KC inputs of the weights, and TMA the same inputs of x, STAGES ahead and on into the next tile
// (ring_walk.cuh): weights before the kernel's predecessor has ended. The order of routed tokens is older than that. Of
// GROUPS warpgroups each takes 128 outputs: a warp makes the weights of two n-tiles of 16 in registers while the
// matmuls of those before are under way (wgmma_tiles.cuh). With GATED these are of gates and of the ups that belong to
// them, so that both of an output are the same lane's. Rows of a tile past its routed tokens are other routed tokens',
// or whatever lies there: they are multiplied and not stored.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "half2.cuh"
#include FORMAT

constexpr int OF_WARP = 2;  // n-tiles of a warp
constexpr int M = 128 * GROUPS, N_TILES = M / 16, THREADS = 128 * GROUPS;  // that multiply
constexpr int K_TILES = I / SPAN, OF_CHUNK = KC / SPAN, CHUNKS = I / KC;   // packed tiles of an n-tile, also of one chunk
constexpr int X_BYTES = ROWS * KC * 2, W_BYTES = N_TILES * OF_CHUNK * PACKED_BYTES;
constexpr int STAGE = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr int OUTS = GATED ? M / 2 : M, WIDTH = GATED ? OUTPUTS / 2 : OUTPUTS;  // of y: of a tile, and all
constexpr int N_TILES_OF_Y = WIDTH / 16;
constexpr int ROWS_PER_LANE = (ROWS + 31) / 32;  // rows that a lane knows
// Registers of a thread that copies, and of one that multiplies: quantized_wgmma.cu has the reason.
constexpr int AT_START = 65536 / (THREADS + 128) / 8 * 8, TO_COPY = GROUPS == 2 ? 40 : 32;
constexpr int REGISTERS = GROUPS == 3 ? 160 : 232;
static_assert((GROUPS == 2 || GROUPS == 3) && GROUPS * REGISTERS + TO_COPY <= (GROUPS + 1) * AT_START);
// Registers lack room for the sums of more rows, and ptxas would have matmuls wait for each other.
static_assert(ROWS <= (GROUPS == 3 ? 96 : 128));
static_assert(KC % 64 == 0 && KC % SPAN == 0 && I % KC == 0 && WIDTH % 16 == 0);
constexpr int SHARE = 1;  // blocks of a cluster side by side
#include "ring_walk.cuh"
#include "expert_walk.cuh"
#include "wgmma_tiles.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The items' parts of the weights and of x, chunk by chunk, by one lane.
__device__ inline void produce(const TensorMap* of_x, const unsigned char* weight, unsigned ring, Barrier* full,
                               Barrier* empty, const Items& items) {
    auto ask = [&](const Walk& at) {  // for a chunk's weights, a warp's n-tiles side by side
        Barrier* const barrier = full + at.pipe.stage;
        const unsigned to = ring + at.pipe.stage * STAGE + X_BYTES;
        const int n_tile = at.item.first / 16, last = N_TILES_OF_Y - 1 - n_tile;  // what is past the end is not stored
        const long long first = (long long)(at.item.expert * (OUTPUTS / 16) + n_tile) * K_TILES + at.chunk * OF_CHUNK;
        mbarrier_expect(barrier, W_BYTES + X_BYTES);
#pragma unroll
        for (int i = 0; i < N_TILES; i++) {
            const int there = GATED ? i % 2 * N_TILES_OF_Y + min(i / 2, last) : min(i, last);
            bulk_load(to + i * OF_CHUNK * PACKED_BYTES, weight + (first + there * K_TILES) * PACKED_BYTES,
                      OF_CHUNK * PACKED_BYTES, barrier);
        }
    };
    auto ask_x = [&](const Walk& at) {
        const unsigned to = ring + at.pipe.stage * STAGE;
#pragma unroll
        for (int b = 0; b < KC / 64; b++)
            tma_load(to + b * ROWS * 128, of_x, at.chunk * KC + b * 64, at.item.row, full + at.pipe.stage);
    };
    Walk first(items), next(items);
    fill_ring(first, next, empty, ask, ask_x);
}

// A lane's share of an item's sums, and its facts of rows lane + 32 j. It is asked for before the item is multiplied.
struct Known {
    T bias[OF_WARP][2];  // of outputs lane / 4 of the warp's n-tiles and 8 below
    int routed[ROWS_PER_LANE];
    float weights[ROWS_PER_LANE];

    __device__ Known(const Item& item, const T* of_all, const int* sorted_ids) {
        const int lane = threadIdx.x % 32, first = item.first + threadIdx.x / 32 * (GATED ? 16 : 32);
#pragma unroll
        for (int j = 0; j < ROWS_PER_LANE; j++) {
            const int row = lane + j * 32;
            routed[j] = row < item.rows ? __ldcg(sorted_ids + item.row + row) : 0;
        }
#pragma unroll
        for (int s = 0; s < OF_WARP; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int out = first + (GATED ? 0 : s * 16) + half * 8 + lane / 4;
                if (BIAS && out < WIDTH)
                    bias[s][half] = of_all[(long long)item.expert * OUTPUTS + (GATED ? s * WIDTH : 0) + out];
            }
    }
    // Once the routed tokens are known. All rows of a tile have one: past the item's it is the first.
    __device__ inline void find_weights(const float* of_routed) {
#pragma unroll
        for (int j = 0; j < ROWS_PER_LANE; j++) weights[j] = GATED || BIAS ? of_routed[routed[j]] : 0;
    }
    __device__ inline float added(int n_tile, int half) const { return BIAS ? to_float(bias[n_tile][half]) : 0; }
};

// The sums of a warp's two n-tiles.
__device__ inline void multiply(unsigned ring, Barrier* full, Barrier* empty, PipelineState& at, const float* weights,
                                Known& known, float (&sum)[OF_WARP][ROWS / 2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned a[2][2][4];
#pragma unroll 1
    for (int n = 0; n < CHUNKS; n++) {
        const unsigned stage = ring + at.stage * STAGE;
        mbarrier_wait(full + at.stage, at.phase);
        multiply_chunk(stage, warp, lane, n > 0, a, sum, [&] {
            // The chunk before has been multiplied, so its stage has been read.
            mbarrier_arrive_if(n > 0 && lane == 0, empty + (at.stage ? at.stage : STAGES) - 1);
        });
        at.advance();
        if (n == 0) known.find_weights(weights);
    }
    wgmma_wait<0>();
    mbarrier_arrive_if(lane == 0, empty + (at.stage ? at.stage : STAGES) - 1);
#pragma unroll
    for (int s = 0; s < OF_WARP; s++) fence_registers(sum[s]);
}

// An item's sums: pairs of rows become pairs of outputs, and then four outputs side by side.
__device__ inline void store(const float (&sum)[OF_WARP][ROWS / 2], const Known& known, const Item& item, T* y) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        if (j * 8 >= item.rows) break;
        const int row = j * 8 + g;
        float by[2] = {};  // the weights of rows 2 t and 2 t + 1
        if constexpr (GATED || BIAS) {
#pragma unroll
            for (int i = 0; i < 2; i++) by[i] = __shfl_sync(0xffffffffu, known.weights[j / 4], j % 4 * 8 + t * 2 + i);
        }
        const int routed_id = GATED ? item.row + row : __shfl_sync(0xffffffffu, known.routed[j / 4], j % 4 * 8 + g);
#pragma unroll
        for (int s = 0; s < (GATED ? 1 : OF_WARP); s++) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = sum[s][j * 4 + i] + known.added(s, i / 2) * (GATED ? 1 : by[i % 2]);
                if constexpr (GATED) x[i] = gated<T, ACT>(x[i], sum[1][j * 4 + i] + known.added(1, i / 2)) * by[i % 2];
            }
            unsigned a = transpose_8x8(pack<T>(x[0], x[1])), b = transpose_8x8(pack<T>(x[2], x[3]));
            swap_lanes(a, b, 1);
            const int column = item.first + (GATED ? warp : warp * 2 + s) * 16 + t % 2 * 8 + t / 2 * 4;
            if (row < item.rows && column < WIDTH) *(uint2*)(y + (long long)routed_id * WIDTH + column) = make_uint2(a, b);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
quantized_wgmma_experts(const __grid_constant__ TensorMap of_x, const unsigned char* weight, const T* bias,
                        const float* weights, const int* sorted_ids, const int* offsets, const int* tile_expert,
                        const int* tile_start, T* y, int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    const int thread = threadIdx.x;
    if (thread == 0) init_ring(full, empty, THREADS / 32);
    __syncthreads();
    const Items items{offsets, tile_expert, tile_start, tiles};
    if (thread >= THREADS) {
        set_registers<TO_COPY>(false);
        if (thread / 32 == THREADS / 32 && elected()) produce(&of_x, weight, ring, full, empty, items);
    } else {
        set_registers<REGISTERS>(true);
        grid_wait();
        int index = blockIdx.x;
        Lookup next = items.seek(index);
        items.find(next);
        PipelineState at;
#pragma unroll 1
        while (__shfl_sync(0xffffffffu, next.expert, 0) >= 0) {
            const Item item = items.item(index, next);
            Known known(item, bias, sorted_ids);
            index += gridDim.x;
            next = items.seek(index);
            float sum[OF_WARP][ROWS / 2];
            multiply(ring, full, empty, at, weights, known, sum);
            items.find(next);
            store(sum, known, item, y);
        }
    }
#endif
}
