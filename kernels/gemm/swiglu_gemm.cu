// y [rows, OUTPUTS] = act(x G^T) * (x U^T) of thousands of rows, where W [2 OUTPUTS, I] is G over U: for sm_90 alone.
// With BIAS, bias [2 OUTPUTS] is added before.
//
// Two blocks of a cluster take 128 rows each and the same OUTS outputs; each brings one of the two matrices' rows to
// both, which halves what comes from the second-level cache. One warp of a block has TMA bring chunks of KC
// inputs, STAGES ahead and on into the next tile; two groups of four warps multiply, 64 rows each, gates and ups side
// by side, so that both of an output lie in the same lane: sums never leave the registers.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, OUTS = 128, KC = 64, CHUNKS = I / KC;
constexpr int X_BYTES = ROWS * KC * 2, W_BYTES = 2 * OUTS * KC * 2, STAGE = X_BYTES + W_BYTES;
constexpr int AHEAD = 8;  // pairs of rows that take the same outputs one after the other, as the cache holds their x

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PAIRED __cluster_dims__(2, 1, 1)

struct TilePosition {  // of a cluster's tile
    int row, out;

    __device__ TilePosition(int tile, int pairs) {
        const int of_group = AHEAD * (OUTPUTS / OUTS), group = tile / of_group, within = tile % of_group;
        const int here = min(pairs - group * AHEAD, AHEAD);
        row = (group * AHEAD + within % here) * 2 * ROWS, out = within / here * OUTS;
    }
};

// One thread has TMA bring all chunks of the cluster's tiles.
__device__ __forceinline__ void produce(const TensorMap* of_x, const TensorMap* of_w, unsigned ring, Barrier* full,
                                        Barrier* empty, int rank, int tiles, int pairs) {
    for (int tile = blockIdx.x / 2, n = 0; tile < tiles; tile += gridDim.x / 2) {
        const TilePosition position(tile, pairs);
        for (int c = 0; c < CHUNKS; c++, n++) {
            const int stage = n % STAGES;
            const unsigned to = ring + stage * STAGE;
            if (n >= STAGES) mbarrier_wait(empty + stage, n / STAGES - 1);
            mbarrier_expect(full + stage, STAGE);
            tma_load(to, of_x, c * KC, position.row + rank * ROWS, full + stage);
            tma_load_multicast(to + X_BYTES + rank * OUTS * KC * 2, of_w, c * KC, rank * OUTPUTS + position.out,
                               full + stage);
        }
    }
}

// A lane's sums of rows `first` and 8 below, at `out` of y.
__device__ __forceinline__ void store(const float (&sum)[OUTS], const T* bias, T* y, int first, int out, int rows) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first + h * 8;
        T* const to = y + (long long)row * OUTPUTS + out;
#pragma unroll
        for (int k = 0; k < OUTS / 32; k++) {
            unsigned x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = k * 16 + j * 4 + h * 2;
                float2 gate = make_float2(sum[at], sum[at + 1]);
                float2 up = make_float2(sum[at + OUTS / 2], sum[at + 1 + OUTS / 2]);
                if constexpr (BIAS) {
                    const T* const of = bias + out + k * 32 + j * 8 + threadIdx.x % 4 * 2;
                    const Vec<T, 2> g = *(const Vec<T, 2>*)of, u = *(const Vec<T, 2>*)(of + OUTPUTS);
                    gate.x += to_float(g.x[0]), gate.y += to_float(g.x[1]);
                    up.x += to_float(u.x[0]), up.y += to_float(u.x[1]);
                }
                x[j] = pack<T>(gated<T, ACT>(gate.x, up.x), gated<T, ACT>(gate.y, up.y));
            }
            exchange_quads(x);
            if (row < rows) *(uint4*)(to + k * 32 + threadIdx.x % 4 * 8) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

#else
#define PAIRED
#endif

extern "C" __global__ void PAIRED __launch_bounds__(384, 1)
swiglu_gemm(const __grid_constant__ TensorMap of_x, const __grid_constant__ TensorMap of_w, const T* bias, T* y,
            int rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank();
    const int pairs = (rows + 2 * ROWS - 1) / (2 * ROWS), tiles = pairs * (OUTPUTS / OUTS);
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) mbarrier_init(full + s, 1), mbarrier_init(empty + s, 16);  // warps of both blocks
        fence_mbarrier_init();
    }
    cluster_sync();
    grid_wait();
    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            produce(&of_x, &of_w, ring, full, empty, rank, tiles, pairs);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int group = warp / 4 - 1, quarter = warp % 4;
        float sum[OUTS];  // of rows lane / 4 and 8 below, pairs of each eight gates, then of ups
        for (int tile = blockIdx.x / 2, n = 0; tile < tiles; tile += gridDim.x / 2) {
            const TilePosition position(tile, pairs);
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++, n++) {
                const int stage = n % STAGES;
                const unsigned from = ring + stage * STAGE;
                mbarrier_wait(full + stage, n / STAGES);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < KC / 16; k++)
                    wgmma(T(), sum, smem_descriptor(from + group * 64 * KC * 2 + k * 32, 16),
                          smem_descriptor(from + X_BYTES + k * 32, 16), k > 0 || c > 0);
                wgmma_commit();
                if (c > 0) {
                    wgmma_wait<1>();  // the chunk before has been read
                    if (lane < 2) mbarrier_arrive_at(empty + (n - 1) % STAGES, lane);
                }
            }
            wgmma_wait<0>();
            if (lane < 2) mbarrier_arrive_at(empty + (n - 1) % STAGES, lane);
            fence_registers(sum);
            store(sum, bias, y, position.row + rank * ROWS + group * 64 + quarter * 16 + lane / 4, position.out, rows);
        }
    }
    __syncwarp();
    cluster_sync();  // neither block leaves while the other may write to it
#endif
}
