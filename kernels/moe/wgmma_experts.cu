// Grouped GEMMs of experts of 16 bits with many routed tokens each, by Hopper's asynchronous tensor-core instructions:
// for sm_90a alone. x [routed, I] is in the order of group.cu, as gather_routed.cu makes it, so that the routed tokens
// of an expert are rows side by side. Weights are [experts, OUTPUTS, I]. With UP, y is in that order, too: with GATED
// weight of the routed token * act(gate) * up [routed, OUTPUTS / 2], else weight * act(up) [routed, OUTPUTS]. Without UP
// y [routed, OUTPUTS] is in the routed tokens' own order. With BIAS, bias [experts, OUTPUTS] is added, times the routed
// token's weight where x has it in already.
//
// A tile has up to ROWS routed tokens of one expert and M outputs of the weights (expert_walk.cuh). One warp has TMA
// bring chunks of KC inputs, STAGES ahead and on into the next tile (ring_walk.cuh): weights before the kernel's
// predecessor has ended. The order of routed tokens is older than that, and what dequantises weights lets nothing start
// early (dequantize_tiles.cu). A warpgroup multiplies 64 routed tokens by all outputs, of which gates and ups lie side
// by side, so that both of an output are the same lane's. Rows of a tile past its routed tokens are other routed
// tokens', or whatever lies there: they are multiplied and not stored.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

constexpr int CHUNKS = (I + KC - 1) / KC;  // inputs past the last one are zeros
constexpr int OUTS = GATED ? M / 2 : M, WIDTH = GATED ? OUTPUTS / 2 : OUTPUTS;  // of y: of a tile, and all
constexpr int ROW_BYTES = KC * 2, X_BYTES = ROWS * ROW_BYTES, STAGE = X_BYTES + M * ROW_BYTES;
constexpr int GROUPS = ROWS / 64, THREADS = 128 * GROUPS;  // warpgroups, and threads, that multiply
// Outputs of an instruction: for one of 256, ptxas wants more registers than three warpgroups begin with.
constexpr int N = GROUPS == 2 ? M : M / 2, PARTS = M / N;
// Registers of a thread that copies, and of one that multiplies: quantized_wgmma.cu has the reason.
constexpr int TO_COPY = GROUPS == 2 ? 40 : 32, REGISTERS = GROUPS == 2 ? 232 : 160;
static_assert(KC == 64 && M == 256);  // a row of TMA's swizzle, and what the sums of a warpgroup have registers for
static_assert(I % 8 == 0 && WIDTH % 8 == 0 && (GROUPS == 2 || GROUPS == 3));
constexpr int SHARE = 1;  // blocks of a cluster side by side
#include "ring_walk.cuh"
#include "expert_walk.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The items' parts of the weights and of x, chunk by chunk, by one lane.
__device__ inline void produce(const TensorMap* of_x, const TensorMap* of_w, unsigned ring, Barrier* full, Barrier* empty,
                               const Items& items) {
    auto ask = [&](const Walk& at) {  // for a chunk's weights, in two boxes
        Barrier* const barrier = full + at.pipe.stage;
        const unsigned to = ring + at.pipe.stage * STAGE + X_BYTES;
        const int first = at.item.expert * OUTPUTS + at.item.first;
        mbarrier_expect(barrier, STAGE);
        tma_load(to, of_w, at.chunk * KC, first, barrier);
        tma_load(to + M / 2 * ROW_BYTES, of_w, at.chunk * KC, first + (GATED ? WIDTH : M / 2), barrier);
    };
    auto ask_x = [&](const Walk& at) {
        tma_load(ring + at.pipe.stage * STAGE, of_x, at.chunk * KC, at.item.row, full + at.pipe.stage);
    };
    Walk first(items), next(items);
    fill_ring(first, next, empty, ask, ask_x);
}

// The sums of a warpgroup's 64 routed tokens: of rows lane / 4 of the warp's 16 and 8 below, pairs of each eight
// outputs.
__device__ inline void multiply(unsigned ring, int group, Barrier* full, Barrier* empty, PipelineState& at,
                                float (&sum)[PARTS][N / 2]) {
    auto begin = [&](bool add) {
        const unsigned x = ring + at.stage * STAGE + group * 64 * ROW_BYTES, weights = ring + at.stage * STAGE + X_BYTES;
        mbarrier_wait(full + at.stage, at.phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KC / 16; k++)
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                wgmma(T(), sum[p], smem_descriptor(x + k * 32, 16),
                      smem_descriptor(weights + p * N * ROW_BYTES + k * 32, 16), add || k > 0);
        wgmma_commit();
    };
    auto fence = [&] {
#pragma unroll
        for (int p = 0; p < PARTS; p++) fence_registers(sum[p]);
    };
    fence();
    begin(false);
#pragma unroll 1
    for (int c = 1; c < CHUNKS; c++) {
        const int before = at.stage;
        at.advance();
        begin(true);
        wgmma_wait<1>();  // the chunk before has been read
        mbarrier_arrive_if(threadIdx.x % 32 == 0, empty + before);
    }
    wgmma_wait<0>();
    mbarrier_arrive_if(threadIdx.x % 32 == 0, empty + at.stage);
    at.advance();
    fence();
}

// An item's sums: eight outputs of y side by side a lane.
__device__ inline void store(const float (&sum)[PARTS][N / 2], const Item& item, const T* bias, const float* weights,
                             const int* sorted_ids, T* y) {
    const int lane = threadIdx.x % 32, top = threadIdx.x / 32 * 16 + lane / 4;
    const T* const added = bias + (long long)item.expert * OUTPUTS;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = top + h * 8;
        const bool mine = row < item.rows;
        const int routed_id = mine ? __ldcg(sorted_ids + item.row + row) : 0;
        const float by = mine && (UP || BIAS) ? weights[routed_id] : 0;
        T* const to = y + (long long)(UP ? item.row + row : routed_id) * WIDTH;
        auto value = [&](int out, int at) {
            auto at_sum = [&](int at) { return sum[at / (N / 2)][at % (N / 2)]; };
            float one = at_sum(at), up = GATED ? at_sum(at + M / 4) : 1;
            if (BIAS && out < WIDTH) one += to_float(added[out]) * (UP ? 1 : by);
            if (BIAS && GATED && out < WIDTH) up += to_float(added[WIDTH + out]);
            if constexpr (UP) one = gated<T, ACT>(one, up) * by;
            return one;
        };
#pragma unroll
        for (int k = 0; k < OUTS / 32; k++) {
            unsigned x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = k * 16 + j * 4 + h * 2, out = item.first + k * 32 + j * 8 + lane % 4 * 2;
                x[j] = pack<T>(value(out, at), value(out + 1, at + 1));
            }
            exchange_quads(x);
            const int out = item.first + k * 32 + lane % 4 * 8;
            if (mine && out < WIDTH) *(uint4*)(to + out) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
wgmma_experts(const __grid_constant__ TensorMap of_x, const __grid_constant__ TensorMap of_w, const T* bias,
              const float* weights, const int* sorted_ids, const int* offsets, const int* tile_expert, const int* tile_start, T* y,
              int tiles) {
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
        if (thread / 32 == THREADS / 32 && elected()) produce(&of_x, &of_w, ring, full, empty, items);
    } else {
        set_registers<REGISTERS>(true);
        grid_wait();
        const int group = __shfl_sync(0xffffffffu, thread / 128, 0);  // ptxas knows that it is the same of all lanes
        int index = blockIdx.x;
        Lookup next = items.seek(index);
        items.find(next);
        PipelineState at;
#pragma unroll 1
        while (__shfl_sync(0xffffffffu, next.expert, 0) >= 0) {
            const Item item = items.item(index, next);
            index += gridDim.x;
            next = items.seek(index);
            float sum[PARTS][N / 2];
            multiply(ring, group, full, empty, at, sum);
            items.find(next);
            store(sum, item, bias, weights, sorted_ids, y);
        }
    }
#endif
}
