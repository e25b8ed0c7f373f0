// y [outputs] = W x [I] for one row, at the speed at which W, in packed tiles with a scale for each GROUP of inputs, is
// read: from sm_90 on.
//
// Of the tensor cores' eight columns each has a group of inputs, and zeros elsewhere. So one sum per output and column
// runs on over a unit of eight groups, and a lane scales four sums of a unit, each by its own scale: nothing is scaled or
// decoded twice. Codes are multiplied as they are widened, more by RAISED, and a group's sum of x,
// which is known beforehand, takes that away again and is multiplied by the minimum.
//
// Blocks stay and take n-tiles of 16 outputs in turn. Of an n-tile's runs of RUN packed tiles each warp takes every
// WARPS-th: bulk copies bring them to the warp's own stages, on into the next tile, the first ones before the kernel's
// predecessor has ended. With GATED, W is a gate matrix over an up matrix, a tile has an n-tile of each, and y =
// act(gate) * up. With BIAS, bias [outputs] is added.
#include "tma.cuh"
#include "mma.cuh"
#include "half2.cuh"
#include FORMAT

constexpr int THREADS = WARPS * 32;
constexpr int UNIT = 8 * GROUP;  // inputs of the groups at once
constexpr int K_TILES = I / SPAN, RUNS = K_TILES / RUN, UNITS = RUN * SPAN / UNIT;  // of an n-tile; of a run
constexpr int STAGE = N_TILES * RUN * PACKED_BYTES;
constexpr int SUMS = N_TILES * WARPS * 16 * 4;  // of a tile
static_assert(K_TILES % RUN == 0 && RUN * SPAN % UNIT == 0 && N_TILES == 1 + GATED && PACKED_BYTES % 16 == 0);

#if __CUDA_ARCH__ >= 900
// A unit of each n-tile, added to outputs lane / 4 and 8 below. x_from: the lane's own 16 bytes of x, which it has
// instead of zeros at part `mine` of 32 inputs. wholes: x summed up over the lane's two groups.
__device__ inline void multiply(unsigned w_from, unsigned x_from, unsigned zeros, int mine, float2 wholes,
                                float (&sum)[N_TILES][2]) {
    const int lane = threadIdx.x % 32, pair = lane % 4;
    unsigned words[N_TILES][UNIT / SPAN][WORDS];
    Pair tables[N_TILES];
#pragma unroll
    for (int o = 0; o < N_TILES; o++) {
        const unsigned from = w_from + o * RUN * PACKED_BYTES;
#pragma unroll
        for (int k = 0; k < UNIT / SPAN; k++) read_words(Shared{from + k * PACKED_BYTES}, lane, words[o][k]);
        constexpr int PER_TILE = SPAN / GROUP / 2;  // pairs
        tables[o] = shared_pair(from + pair / PER_TILE * PACKED_BYTES, lane, pair % PER_TILE);
    }
    float part[N_TILES][2][4];  // of even and odd steps, so that fewer wait for each other
    const float less[2] = {-RAISED<T> * wholes.x, -RAISED<T> * wholes.y};
#pragma unroll
    for (int o = 0; o < N_TILES; o++)
#pragma unroll
        for (int i = 0; i < 4; i++) part[o][0][i] = less[i % 2], part[o][1][i] = 0;
#pragma unroll
    for (int p = 0; p < UNIT / 32; p++) {
        unsigned b[4];
        ldmatrix(b, p == mine ? x_from : zeros);
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int o = 0; o < N_TILES; o++) {
                unsigned a[4];
                raised_codes<T>(words[o][p / 2], p % 2 * 2 + s, a);
                mma<T>(part[o][s], a, b[2 * s], b[2 * s + 1]);
            }
    }
#pragma unroll
    for (int o = 0; o < N_TILES; o++)
#pragma unroll
        for (int g = 0; g < 2; g++) {
            const float2 by = of_pair<0>(tables[o], g);
            sum[o][0] += by.x * (part[o][0][g] + part[o][1][g]);
            sum[o][1] += by.y * (part[o][0][2 + g] + part[o][1][2 + g]);
            if constexpr (MINIMA) {
                const float2 minimum = of_pair<MINIMA>(tables[o], g);
                sum[o][0] -= minimum.x * (g ? wholes.y : wholes.x);
                sum[o][1] -= minimum.y * (g ? wholes.y : wholes.x);
            }
        }
}

// x to shared memory, and its sums over groups: lanes side by side have eights of one.
__device__ inline void fetch_row(const T* x, unsigned char* xs, float* wholes) {
    constexpr int EIGHTS = I / 8, OF_GROUP = GROUP / 8, AT_ONCE = 4;
#pragma unroll 1
    for (int first = 0; first < EIGHTS; first += AT_ONCE * THREADS) {
        uint4 eights[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = first + k * THREADS + threadIdx.x;
            eights[k] = i < EIGHTS ? ((const uint4*)x)[i] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = first + k * THREADS + threadIdx.x;
            const uint4 eight = eights[k];
            const float2 a = unpack<T>(eight.x), b = unpack<T>(eight.y), c = unpack<T>(eight.z), d = unpack<T>(eight.w);
            float sum = ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
#pragma unroll
            for (int l = 1; l < OF_GROUP; l *= 2) sum += __shfl_xor_sync(~0u, sum, l);
            if (i >= EIGHTS) continue;
            *(uint4*)(xs + i * 16) = eight;
            if (i % OF_GROUP == 0) wholes[i / OF_GROUP] = sum;
        }
    }
    __syncthreads();
}

// A tile's values by 16 lanes from all warps' sums, of which four lanes had parts of an output's.
__device__ inline void store(const float* sums, const T* bias, T* y, int tile, int width) {
    const int out = threadIdx.x % 32, column = tile * 16 + out;
    auto total = [&](int n_tile) {
        float four[4] = {}, whole = BIAS ? to_float(bias[n_tile * width + column]) : 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float4 more = *(const float4*)(sums + ((n_tile * WARPS + w) * 16 + out) * 4);
            four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) whole += four[i];
        return whole;
    };
    if (out >= 16 || column >= width) return;
    const float value = total(0);
    y[column] = from_float<T>(GATED ? gated<T, ACT>(value, total(N_TILES - 1)) : value);
}

struct Ahead {  // the run that a warp asks for next
    const unsigned char* weight;
    Barrier* full;
    unsigned ring;
    int tiles, warp, tile, run;

    __device__ __forceinline__ void ask(int stage) {
        if (tile >= tiles || run >= RUNS) return;
        if (elected()) {
            mbarrier_expect(full + stage, STAGE);
#pragma unroll
            for (int o = 0; o < N_TILES; o++)
                bulk_load(ring + stage * STAGE + o * RUN * PACKED_BYTES,
                          weight + ((long long)(tile + o * tiles) * K_TILES + run * RUN) * PACKED_BYTES,
                          RUN * PACKED_BYTES, full + stage);
        }
        run += WARPS;
        if (run >= RUNS) run = warp, tile += gridDim.x;
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
grouped_gemv(const T* x, const unsigned char* weight, const T* bias, T* y, int outputs) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier barriers[WARPS * STAGES];
    unsigned char* const xs = (unsigned char*)(memory + 1);  // behind zeros
    float* const wholes = (float*)(xs + I * 2);
    float* const sums = wholes + (I / GROUP + 3) / 4 * 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned ring = smem_address(sums + 2 * SUMS) + warp * STAGES * STAGE;
    Barrier* const full = barriers + warp * STAGES;
    const int width = GATED ? outputs / 2 : outputs, tiles = (width + 15) / 16;
    if (lane < STAGES) mbarrier_init(full + lane, 1);
    fence_mbarrier_init();
    __syncwarp();
    Ahead ahead = {weight, full, ring, tiles, warp, (int)blockIdx.x, warp};
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) ahead.ask(s);
    grid_wait();
    launch_dependents();
    if (threadIdx.x == 0) memory[0] = make_uint4(0, 0, 0, 0);
    fetch_row(x, xs, wholes);
    // The lane has eight inputs of a group; as a pair of columns it has two groups.
    const int group = lane % 8, eight = lane / 8;
    const int mine = eight * 8 % 32 / GROUP == group % (32 / GROUP) ? group * GROUP / 32 : -1;
    const unsigned zeros = smem_address(memory);
    const unsigned x_from = smem_address(xs) + mine * 64 + eight * 16;
    const float* const wholes_from = wholes + lane % 4 * 2;
    int stage = 0, round = 0, buffer = 0, turn = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[N_TILES][2] = {};
#pragma unroll 1
        for (int run = warp; run < RUNS; run += WARPS) {
            mbarrier_wait(full + stage, round);
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int unit = run * UNITS + u;
                multiply(ring + stage * STAGE + u * (UNIT / SPAN) * PACKED_BYTES, x_from + unit * UNIT * 2, zeros, mine,
                         *(const float2*)(wholes_from + unit * 8), sum);
            }
            fence_async_proxy();
            __syncwarp();
            ahead.ask(stage);
            if (++stage == STAGES) stage = 0, round++;
        }
        float* const here = sums + buffer * SUMS + (warp * 16 + lane / 4) * 4 + lane % 4;
#pragma unroll
        for (int o = 0; o < N_TILES; o++) here[o * WARPS * 64] = sum[o][0], here[o * WARPS * 64 + 32] = sum[o][1];
        __syncthreads();
        if (warp == turn) store(sums + buffer * SUMS, bias, y, tile, width);
        buffer ^= 1;
        if (++turn == WARPS) turn = 0;
    }
#endif
}
