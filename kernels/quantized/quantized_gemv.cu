// y [R, outputs] = x [R, I] W^T for up to eight rows, at the speed at which W, in packed tiles of a quantised format,
// is read.
//
// WARPS of a block take the packed tiles of N_TILES n-tiles of 16 outputs in turn and multiply them by tensor cores, for
// which rows of x are columns: to widen codes for them takes half as many instructions as to make floats. The first
// AHEAD packed tiles of each warp are asked for before the kernel's predecessor has ended: weights do not change. With
// GATED, W is a gate matrix over an up matrix, a block's two n-tiles are one of each, and y = act(gate) * up. With
// BIAS, bias [outputs] is added.
#include "mma.cuh"
#include "half2.cuh"
#include FORMAT
#include "gemv_tiles.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int K_TILES = I / SPAN, STEPS = (K_TILES + WARPS - 1) / WARPS;  // of an n-tile; that a warp takes
constexpr int PITCH = I * 2 + 16;  // bytes from row to row of x: what an instruction reads of eight lies in different banks
constexpr int SUMS = N_TILES * 128;  // of a warp

// A lane's sums to shared memory, from `here` on.
__device__ __forceinline__ void keep_sums(const float (&sum)[N_TILES][4], float* here) {
#pragma unroll
    for (int o = 0; o < N_TILES; o++)
#pragma unroll
        for (int i = 0; i < 4; i++) here[o * 128 + i / 2 * 64 + i % 2] = sum[o][i];
}

// Values of the block's n-tiles, the first of which is `first`, from its warps' sums.
__device__ __forceinline__ void store(const float* sums, const T* bias, T* y, int first, int width) {
    auto total = [&](int n_tile, int out, int row, int column) {
        float value = BIAS ? to_float(bias[column]) : 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) value += sums[w * SUMS + n_tile * 128 + out * 8 + row];
        return value;
    };
    for (int i = threadIdx.x; i < R * 16 * (GATED ? 1 : N_TILES); i += THREADS) {
        const int out = i % 16, n_tile = i / 16 % (GATED ? 1 : N_TILES), row = i / 16 / (GATED ? 1 : N_TILES);
        const int column = (first + n_tile) * 16 + out;
        if (column >= width) continue;
        float value = total(n_tile, out, row, column);
        if (GATED) value = gated<T, ACT>(value, total(N_TILES - 1, out, row, width + column));
        y[(long long)row * width + column] = from_float<T>(value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
quantized_gemv(const T* x, const unsigned char* weight, const T* bias, T* y, int outputs) {
    extern __shared__ uint4 memory[];
    unsigned char* const xs = (unsigned char*)memory;
    float* const sums = (float*)(xs + R * PITCH);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int width = GATED ? outputs / 2 : outputs, n_tiles = (width + 15) / 16;
    const int first = GATED ? blockIdx.x : blockIdx.x * N_TILES;
    PackedTiles from[N_TILES];
#pragma unroll
    for (int o = 0; o < N_TILES; o++) {
        const int n_tile = GATED ? first + o * n_tiles : min(first + o, n_tiles - 1);  // what is past the end is not stored
        from[o] = PackedTiles(weight + ((long long)n_tile * K_TILES + warp) * PACKED_BYTES, lane);
    }
    auto there = [&](int step) { return step < STEPS && (K_TILES % WARPS == 0 || warp + step * WARPS < K_TILES); };
    PackedTile ring[AHEAD][N_TILES];
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
#pragma unroll
        for (int o = 0; o < N_TILES; o++)
            if (there(u)) ring[u][o] = from[o].stream(u * WARPS);
    grid_wait();
    launch_dependents();
    for (int i = threadIdx.x; i < R * I / 8; i += THREADS)
        *(uint4*)(xs + i / (I / 8) * PITCH + i % (I / 8) * 16) = ((const uint4*)x)[i];
    __syncthreads();
    // A lane's row of x, and there its part of the first packed tile's inputs. Columns past R repeat the last row.
    const int row_of_x = BY_RUNS ? lane / 4 : lane % 8, part_of_x = BY_RUNS ? lane % 4 * 32 : lane / 8 * 16;
    unsigned x_from = smem_address(xs) + min(row_of_x, R - 1) * PITCH + warp * SPAN * 2 + part_of_x;
    float sum[N_TILES][4] = {};  // outputs lane / 4 and 8 below, rows lane % 4 * 2 and + 1
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int o = 0; o < N_TILES; o++) from[o].advance(AHEAD * WARPS);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if ((STEPS % AHEAD || K_TILES % WARPS) && !there(s + u)) break;
            unsigned b[SPAN / 32][4];
            load_rows(x_from + u * WARPS * SPAN * 2, b);
            float whole[GROUPS][4] = {};
            sum_up(b, whole);
#pragma unroll
            for (int o = 0; o < N_TILES; o++) {
                multiply(ring[u][o], b, whole, sum[o]);
                if (there(s + u + AHEAD)) ring[u][o] = from[o].stream(u * WARPS);
            }
        }
        x_from += AHEAD * WARPS * SPAN * 2;
    }
    keep_sums(sum, sums + warp * SUMS + lane / 4 * 8 + lane % 4 * 2);
    __syncthreads();
    store(sums, bias, y, first, width);
}
