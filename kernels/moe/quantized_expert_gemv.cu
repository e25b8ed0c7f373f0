// The quantised experts of a small batch, whose weights are in packed tiles (kernels/quantized/packed_gemm.py):
// each routed token of a token and one of its TOP experts reads that expert's weights for itself. Weights are [experts,
// OUTPUTS, I]. With GATED, y [routed, OUTPUTS / 2] is weight of the routed token * act(gate) * up, of x [tokens, I];
// else y [tokens, OUTPUTS] is the sum over each token's experts, of x [routed, I], which has the routed tokens' weights
// in it. With BIAS, bias [experts, OUTPUTS] is added. With PART this rank has `experts` of the router's experts, from
// `first` on: routed tokens of others read no weights and count as 0.
//
// A block makes 16 outputs of a routed token or a token. Its WARPS take the packed tiles of the n-tile, or of gate's
// and up's, in turn; without GATED those of all the token's experts, one after the other. AHEAD of them are asked for
// before they are multiplied, as in quantized_gemv.cu.
#include "mma.cuh"
#include "half2.cuh"
#include FORMAT

constexpr int R = 1;
#include "gemv_tiles.cuh"

constexpr int THREADS = WARPS * 32, N_TILES = 1 + GATED, EXPERTS = GATED ? 1 : TOP;  // EXPERTS: that a block reads
constexpr int WIDTH = OUTPUTS / N_TILES, N_TILES_PER_EXPERT = (OUTPUTS + 15) / 16;
constexpr int K_TILES = I / SPAN, ALL = EXPERTS * K_TILES, STEPS = (ALL + WARPS - 1) / WARPS;  // STEPS: that a warp takes

// Loads a block's experts; past the first-level cache, which another kernel may have filled before they were there.
struct Chosen {
    const unsigned char* weight;
    int lane, id;  // id: lane i's of expert i, or -1

    __device__ Chosen(const unsigned char* weight, const int* ids, int first, int experts)
        : weight(weight), lane(threadIdx.x % 32), id(-1) {
        if (lane < EXPERTS) id = __ldcg(ids + blockIdx.x * EXPERTS + lane) - (PART ? first : 0);
        if (PART && (unsigned)id >= (unsigned)experts) id = -1;
    }
    __device__ int expert(int n) const { return __shfl_sync(0xffffffffu, id, n / K_TILES); }
    // The n-th packed tile of an n-tile.
    __device__ PackedTile get(int n, int n_tile) const {
        const long long at = (long long)expert(n) * N_TILES_PER_EXPERT + n_tile;
        return PackedTiles(weight + (at * K_TILES + n % K_TILES) * PACKED_BYTES, lane).stream(0);
    }
};

__device__ __forceinline__ void store(const float (&sums)[WARPS][N_TILES][16], const Chosen& chosen, const T* bias,
                                      const float* weights, T* y) {
    const int out = chosen.lane % 16, column = blockIdx.y * 16 + out;
    float value[N_TILES] = {};
#pragma unroll
    for (int o = 0; o < N_TILES; o++)
#pragma unroll
        for (int w = 0; w < WARPS; w++) value[o] += sums[w][o][out];
#pragma unroll
    for (int e = 0; e < (BIAS ? EXPERTS : 0); e++) {
        const int expert = chosen.expert(e * K_TILES);
        if (expert < 0 || column >= WIDTH) continue;
        const float by = GATED ? 1 : weights[blockIdx.x * EXPERTS + e];
#pragma unroll
        for (int o = 0; o < N_TILES; o++) value[o] += by * to_float(bias[(long long)expert * OUTPUTS + o * WIDTH + column]);
    }
    if constexpr (GATED) value[0] = gated<T, ACT>(value[0], value[N_TILES - 1]) * weights[blockIdx.x];
    if (chosen.lane < 16 && column < WIDTH) y[(long long)blockIdx.x * WIDTH + column] = from_float<T>(value[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
quantized_expert_gemv(const T* x, const unsigned char* weight, const T* bias, const int* ids, const float* weights, T* y,
                      int first, int experts) {
    extern __shared__ uint4 memory[];
    __shared__ float sums[WARPS][N_TILES][16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The router's ids are what the kernel before GATED's has written. The next one starts when that has waited itself,
    // and asks for weights ahead of it.
    if (GATED) grid_wait();
    const Chosen chosen(weight, ids, first, experts);
    auto there = [&](int step) { return ALL % WARPS == 0 ? step < STEPS : warp + step * WARPS < ALL; };
    auto is_local = [&](int step) { return there(step) && (!PART || chosen.expert(warp + step * WARPS) >= 0); };
    PackedTile ring[AHEAD][N_TILES];
    auto ask = [&](int step, PackedTile (&to)[N_TILES]) {
        if (!is_local(step)) return;
#pragma unroll
        for (int o = 0; o < N_TILES; o++) to[o] = chosen.get(warp + step * WARPS, blockIdx.y + o * (WIDTH / 16));
    };
#pragma unroll
    for (int u = 0; u < AHEAD; u++) ask(u, ring[u]);
    if (!GATED) grid_wait();
    launch_dependents();
    const uint4* const from = (const uint4*)(x + (long long)(GATED ? blockIdx.x / TOP : blockIdx.x * TOP) * I);
    for (int i = threadIdx.x; i < EXPERTS * I / 8; i += THREADS) memory[i] = from[i];
    __syncthreads();
    // Each column of the second operand is x.
    const unsigned x_from = smem_address(memory) + (BY_RUNS ? lane % 4 * 32 : lane / 8 * 16);
    float sum[N_TILES][4] = {};  // outputs lane / 4 and 8 below
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD)
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (is_local(s + u)) {
                unsigned b[SPAN / 32][4];
                load_rows(x_from + (warp + (s + u) * WARPS) * SPAN * 2, b);
                float whole[GROUPS][4] = {};
                sum_up(b, whole);
#pragma unroll
                for (int o = 0; o < N_TILES; o++) multiply(ring[u][o], b, whole, sum[o]);
            }
            ask(s + u + AHEAD, ring[u]);
        }
    if (lane % 4 == 0)
#pragma unroll
        for (int o = 0; o < N_TILES; o++) sums[warp][o][lane / 4] = sum[o][0], sums[warp][o][lane / 4 + 8] = sum[o][2];
    __syncthreads();
    if (warp == 0) store(sums, chosen, bias, weights, y);
}
