// Grouped GEMMs of experts whose weights are quantised, in packed tiles (kernels/quantized/packed_gemm.py), from sm_80
// on: y of each routed token, for tiles of ROWS routed tokens that are sorted by expert (group.cu). The weights
// [experts, OUTPUTS, I] lie in n-tiles of 16 outputs.
//
// A block has a tile and SUBS n-tiles; with GATED, SUBS n-tiles of gate and the same of up. GROUPS of its warps share a
// n-tile and take its packed tiles in turn: they are asked for AHEAD of where they are multiplied, and widened in
// registers. x lies in shared memory, in chunks of KC inputs: while one is multiplied, the next comes through
// registers. With GATED, y [routed, OUTPUTS / 2] is weight of the routed token * act(gate) * up, in the order of the
// tiles, of x [tokens, I], TOP routed tokens a token. Else y [routed, OUTPUTS] is in the routed tokens' own order, of x
// [routed, I] in that of the tiles. With BIAS, bias [experts, OUTPUTS] is added, times the routed token's weight where
// x has it in already.
#include "mma.cuh"
#include "half2.cuh"
#include "tile_sums.cuh"
#include FORMAT
#include "tile_mma.cuh"

constexpr int ROWS = 8 * TILES, WARPS = SUBS * GROUPS, THREADS = WARPS * 32, N_TILES = 1 + GATED;  // n-tiles of a warp
constexpr int WIDTH = OUTPUTS / N_TILES, N_TILES_OF_Y = (WIDTH + 15) / 16, N_TILES_PER_EXPERT = (OUTPUTS + 15) / 16;
constexpr int CHUNKS = I / KC, STEPS = KC / STREAMED / GROUPS;  // what a warp streams of an n-tile in a chunk
constexpr int PITCH = KC * 2 + 16;  // bytes from row to row: what an instruction reads of eight lies in different banks
constexpr int LOADS = (ROWS * KC / 8 + THREADS - 1) / THREADS;  // a thread's 16 bytes of a chunk of x
constexpr int WIDE = ROWS + 1;

// A lane's row of x, and there its part of a packed tile's inputs: where that begins.
__device__ inline unsigned part_of_x(int lane) {
    return BY_RUNS ? lane / 4 * PITCH + lane % 4 * 32 : lane % 8 * PITCH + lane / 8 * 16;
}

// A packed tile of each n-tile times 32 inputs of all rows at a time, or twice 32.
__device__ inline void multiply(const Streamed (&packed_tiles)[N_TILES], unsigned x_from, float (&sum)[N_TILES][TILES][4]) {
    constexpr int LOADED = BY_RUNS ? 2 : 1;  // times 32 inputs of x that are loaded together
#pragma unroll
    for (int p = 0; p < STREAMED / 32; p += LOADED) {
        unsigned b[LOADED][TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            const unsigned from = x_from + j * 8 * PITCH + p * 64;
            if constexpr (BY_RUNS)
                load_runs(b[0][j], b[LOADED - 1][j], from);
            else
                ldmatrix(b[0][j], from);
        }
#pragma unroll
        for (int n = 0; n < LOADED; n++) {
            float whole[TILES][PARTS][4] = {};
            if (MINIMA) sum_up_rows(b[n], whole);
#pragma unroll
            for (int o = 0; o < N_TILES; o++) multiply_tile(packed_tiles[o], 2 * (p + n), b[n], whole, sum[o]);
        }
    }
}

// A warp's n-tiles of an expert's weights, from its first packed tile on, and the first packed tiles, which are asked
// for.
__device__ __forceinline__ void start_streams(Stream (&from)[N_TILES], Streamed (&ring)[AHEAD][N_TILES],
                                              const unsigned char* weight, int expert, int n_tile, int group, int lane) {
#pragma unroll
    for (int o = 0; o < N_TILES; o++) {
        const long long at = (long long)expert * N_TILES_PER_EXPERT + n_tile + o * N_TILES_OF_Y;
        from[o] = Stream(weight + at * (I / SPAN) * PACKED_BYTES, lane);
        from[o].advance(group);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
#pragma unroll
        for (int o = 0; o < N_TILES; o++)
            if (u < STEPS * CHUNKS) ring[u][o] = from[o].get(u * GROUPS);
}

// A thread's part of a chunk of x. Rows past the end repeat the last one.
__device__ __forceinline__ void load_x(uint4 (&next)[LOADS], const T* x, const int* sorted_ids, int start, int rows,
                                       int chunk) {
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        const int i = l * THREADS + threadIdx.x, place = start + min(i / (KC / 8), rows - 1);
        if (i >= ROWS * KC / 8) break;
        const long long row = GATED ? sorted_ids[place] / TOP : place;
        next[l] = *(const uint4*)(x + row * I + chunk * KC + i % (KC / 8) * 8);
    }
}

// Stores x to one of two buffers in shared memory.
__device__ __forceinline__ void keep_x(const uint4 (&next)[LOADS], unsigned char* xs, int buffer) {
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        const int i = l * THREADS + threadIdx.x;
        if (i < ROWS * KC / 8) *(uint4*)(xs + (buffer * ROWS + i / (KC / 8)) * PITCH + i % (KC / 8) * 16) = next[l];
    }
}

// Multiplies a warp's part of the c-th chunk of x; asks for the packed tiles AHEAD.
__device__ __forceinline__ void multiply_chunk(int c, unsigned chunk, Stream (&from)[N_TILES], Streamed (&ring)[AHEAD][N_TILES],
                                               float (&sum)[N_TILES][TILES][4]) {
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int o = 0; o < N_TILES; o++) from[o].advance(AHEAD * GROUPS);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (STEPS % AHEAD && s + u >= STEPS) break;  // of one chunk alone
            multiply(ring[u], chunk + (s + u) * GROUPS * STREAMED * 2, sum);
            if (c * STEPS + s + u + AHEAD < STEPS * CHUNKS)
#pragma unroll
                for (int o = 0; o < N_TILES; o++) ring[u][o] = from[o].get(u * GROUPS);
        }
    }
}

// A tile's values from its warps' sums.
__device__ __forceinline__ void store(const float* sums, const T* bias, const int* sorted_ids, const float* weights, T* y,
                                      int expert, int start, int rows) {
    auto total = [&](int of, int o, int out, int row) {
        float value = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) value += sums[(((g * SUBS + of) * N_TILES + o) * 16 + out) * WIDE + row];
        return value;
    };
    for (int i = threadIdx.x; i < rows * SUBS * 16; i += THREADS) {
        const int out = i % 16, of = i / 16 % SUBS, row = i / 16 / SUBS, column = (blockIdx.x * SUBS + of) * 16 + out;
        if (column >= WIDTH) continue;
        const int routed_id = sorted_ids[start + row];
        const T* const more = bias + (long long)expert * OUTPUTS + column;
        float value = total(of, 0, out, row);
        if (GATED) {
            float up = total(of, N_TILES - 1, out, row);
            if (BIAS) value += to_float(more[0]), up += to_float(more[WIDTH]);
            y[(long long)(start + row) * WIDTH + column] = from_float<T>(gated<T, ACT>(value, up) * weights[routed_id]);
        } else {
            if (BIAS) value += to_float(more[0]) * weights[routed_id];
            y[(long long)routed_id * WIDTH + column] = from_float<T>(value);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantized_experts(const T* x, const unsigned char* weight, const T* bias, const int* sorted_ids, const int* offsets,
                  const int* tile_expert, const int* tile_start, const float* weights, T* y) {
    extern __shared__ uint4 memory[];
    unsigned char* const xs = (unsigned char*)memory;
    float* const sums = (float*)memory;  // in the place of x, once that is multiplied
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = warp % SUBS, group = warp / SUBS;
    grid_wait();
    launch_dependents();
    const int expert = tile_expert[blockIdx.y];
    if (expert < 0) return;
    const int start = tile_start[blockIdx.y], rows = min(offsets[expert + 1] - start, ROWS);
    const int n_tile = min((int)blockIdx.x * SUBS + sub, N_TILES_OF_Y - 1);  // what is past the end is not stored
    Stream from[N_TILES];
    Streamed ring[AHEAD][N_TILES];
    start_streams(from, ring, weight, expert, n_tile, group, lane);
    uint4 next[LOADS];
    load_x(next, x, sorted_ids, start, rows, 0);
    keep_x(next, xs, 0);
    __syncthreads();
    const unsigned x_from = smem_address(xs) + group * STREAMED * 2 + part_of_x(lane);
    float sum[N_TILES][TILES][4] = {};  // outputs lane / 4 and 8 below, rows lane % 4 * 2 and + 1
#pragma unroll 1
    for (int c = 0; c < CHUNKS; c++) {
        if (c + 1 < CHUNKS) load_x(next, x, sorted_ids, start, rows, c + 1);
        multiply_chunk(c, x_from + c % 2 * ROWS * PITCH, from, ring, sum);
        if (c + 1 < CHUNKS) keep_x(next, xs, (c + 1) % 2);
        __syncthreads();
    }
    keep_sums<WIDE>(sum, sums + (warp * N_TILES * 16 + lane / 4) * WIDE + lane % 4 * 2);
    __syncthreads();
    store(sums, bias, sorted_ids, weights, y, expert, start, rows);
}
