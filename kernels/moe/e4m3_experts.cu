// Grouped GEMMs of experts whose weights are e4m3 in wide packed tiles (e4m3_wide.cuh), by Hopper's asynchronous
// tensor-core instructions of 8 bits: for sm_90a alone. x [routed, I] is e4m3 with a scale for each row, in the order
// of group.cu, as e4m3_routed.cu makes it, so that the routed tokens of an expert are rows side by side. Weights are
// [experts, OUTPUTS, I]. With GATED, y [routed, OUTPUTS / 2] is weight of the routed token * act(gate) * up in that
// order; else y [routed, OUTPUTS] is in the routed tokens' own order. With BIAS, bias [experts, OUTPUTS] is added,
// times the routed token's weight where x has it in already.
//
// The blocks of a cluster have x in common. expert_walk.cuh has their way from tile to tile, e4m3_ring.cuh what
// multiplies, and ring_walk.cuh the ring, which one warp fills on into the next tiles. It asks for weights before the
// kernel's predecessor has ended, as the order of routed tokens is older than that. Rows of a tile past its routed
// tokens are other routed tokens', or whatever lies there: they are multiplied and not stored.
#include "e4m3_ring.cuh"

constexpr int WIDTH = GATED ? OUTPUTS / 2 : OUTPUTS;                      // of y
constexpr int N_TILES = (OUTPUTS + 15) / 16, N_TILES_OF_Y = WIDTH / 16;     // of 16 outputs, of an expert
static_assert(SPLIT == 1 && OVER == 1 && WIDTH % 16 == 0 && OUTS % 16 == 0);
#include "expert_walk.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The items' parts of the weights and of x, chunk by chunk, by one lane.
__device__ inline void produce(const TensorMap* of_x, const unsigned char* weight, unsigned ring, Barrier* full,
                               Barrier* empty, const Items& items) {
    const int column = cluster_rank() % SHARE;
    constexpr int ALONG = GATED ? 1 : 2;  // half packed tiles that are consecutive in memory and in the ring
    auto ask = [&](const Walk& at) {      // for a chunk's weights
        Barrier* const barrier = full + at.pipe.stage;
        const unsigned to = ring + at.pipe.stage * STAGE + X_BYTES;
        const int n_tile = at.item.first / 16;
        const int last = WIDTH % (OUTS * SHARE) ? N_TILES_OF_Y - 1 - n_tile : HALVES;  // what is past the end is not stored
        const long long first = (long long)(at.item.expert * N_TILES + n_tile) * K_TILES + at.chunk;
        mbarrier_expect(barrier, W_BYTES + X_BYTES);
#pragma unroll
        for (int i = 0; i < HALVES; i += ALONG) {
            const int half = GATED ? i / 2 : i, there = (GATED ? i % 2 * N_TILES_OF_Y : 0) + min(half / 2, last);
            bulk_load(to + i * HALF_BYTES, weight + (first + there * K_TILES) * PACKED_BYTES + half % 2 * HALF_BYTES,
                      ALONG * HALF_BYTES, barrier);
        }
    };
    auto ask_x = [&](const Walk& at) {
        constexpr int PART = ROWS / SHARE;
        Barrier* const barrier = full + at.pipe.stage;
        const unsigned to = ring + at.pipe.stage * STAGE + column * PART * SPAN;
        const int input = at.chunk * (SPAN / 2), row = at.item.row + column * PART;  // input: in elements of two bytes
        if constexpr (SHARE > 1)
            tma_load_multicast(to, of_x, input, row, barrier, (1 << SHARE) - 1);
        else
            tma_load(to, of_x, input, row, barrier);
    };
    Walk first(items), next(items);
    fill_ring(first, next, empty, ask, ask_x);
}

// A lane's facts of an item's rows lane + 32 j.
struct Rows {
    float scales[ROWS_PER_LANE], weights[ROWS_PER_LANE];
    int routed[ROWS_PER_LANE];

    __device__ Rows(const Item& item, const float* of_x, const float* sorted_weights, const int* sorted_ids) {
#pragma unroll
        for (int j = 0; j < ROWS_PER_LANE; j++) {
            const int row = threadIdx.x % 32 + j * 32;
            const bool mine = row < item.rows;
            scales[j] = mine ? of_x[item.row + row] : 0;
            weights[j] = mine && (GATED || BIAS) ? sorted_weights[item.row + row] : 0;
            routed[j] = mine && !GATED ? __ldcg(sorted_ids + item.row + row) : 0;
        }
    }
};

// An item's sums: pairs of rows become pairs of outputs.
__device__ inline void store_sums(const float (&sum)[ROWS / 2], const Rows& of, const Item& item, const T* bias, T* y) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = item.first + warp * (GATED ? 8 : 16), column = first + (GATED ? t * 2 : t % 2 * 8 + t / 2 * 4);
    auto added = [&](int out, int half) {
        return BIAS && out < WIDTH ? to_float(bias[(long long)item.expert * OUTPUTS + half * WIDTH + out]) : 0;
    };
    const float low = added(first + g, 0), high = GATED ? added(first + g, 1) : added(first + g + 8, 0);
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        if (j * 8 >= item.rows) break;
        const float* const v = sum + j * 4;
        const bool mine = j * 8 + g < item.rows && column < WIDTH;
        float even = 0, odd = 0;  // the weights of rows 2 t and 2 t + 1
        if constexpr (GATED || BIAS) {
            even = __shfl_sync(0xffffffffu, of.weights[j / 4], j % 4 * 8 + t * 2);
            odd = __shfl_sync(0xffffffffu, of.weights[j / 4], j % 4 * 8 + t * 2 + 1);
        }
        if constexpr (GATED) {
            even *= gated<T, ACT>(v[0] + low, v[2] + high), odd *= gated<T, ACT>(v[1] + low, v[3] + high);
            const unsigned two = transpose_8x8(pack<T>(even, odd));
            if (mine) *(unsigned*)(y + (long long)(item.row + j * 8 + g) * WIDTH + column) = two;
        } else {
            unsigned a = transpose_8x8(pack<T>(v[0] + low * even, v[1] + low * odd));
            unsigned b = transpose_8x8(pack<T>(v[2] + high * even, v[3] + high * odd));
            swap_lanes(a, b, 1);  // four outputs side by side
            const long long routed_id = __shfl_sync(0xffffffffu, of.routed[j / 4], j % 4 * 8 + g);
            if (mine) *(uint2*)(y + routed_id * WIDTH + column) = make_uint2(a, b);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
e4m3_experts(const __grid_constant__ TensorMap of_x, const float* x_scales, const float* sorted_weights, const unsigned char* weight,
             const T* bias, const int* sorted_ids, const int* offsets, const int* tile_expert, const int* tile_start, T* y,
             int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    const int thread = threadIdx.x;
    if (thread == 0) init_ring(full, empty, THREADS / 32 * SHARE);
    if constexpr (CLUSTER > 1)
        cluster_sync();  // the other's barriers are there, too
    else
        __syncthreads();
    const Items items{offsets, tile_expert, tile_start, tiles};
    if (thread >= THREADS) {
        if constexpr (GROUPS > 1) set_registers<TO_COPY>(false);
        if (thread / 32 == THREADS / 32 && elected()) produce(&of_x, weight, ring, full, empty, items);
    } else {
        if constexpr (GROUPS > 1) set_registers<REGISTERS>(true);
        grid_wait();
        int index = blockIdx.x / SHARE;
        Lookup next = items.seek(index);
        items.find(next);
        Chunks chunks{ring, (int)__shfl_sync(0xffffffffu, thread / 128, 0), full, empty};
        chunks.begin_turns();
#pragma unroll 1
        while (__shfl_sync(0xffffffffu, next.expert, 0) >= 0) {
            const Item item = items.item(index, next);
            const Rows rows(item, x_scales, sorted_weights, sorted_ids);
            index += gridDim.x / SHARE;
            next = items.seek(index);
            float sum[ROWS / 2];
            multiply(chunks, sum);
            items.find(next);
            scale_rows(rows.scales, sum);
            store_sums(sum, rows, item, bias, y);
        }
        chunks.end_turns();
        if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while the other may write there
    }
#endif
}
