// y [R, outputs] = x [R, I] W^T for one to a few rows: a warp reads OUTS rows of W as fast as memory gives them.
//
// The first AHEAD vectors of each are asked for before the kernel's predecessor has ended: weights do not change. I is
// a multiple of a warp's access, outputs one of what a block computes. Shared memory: x, R * I elements. With GATED, W
// is a gate matrix over an up matrix, a warp's two rows are one of each, and y = act(gate) * up. With BIAS, bias
// [outputs] is added.

constexpr int V = 8;                 // elements of one access
constexpr int STEPS = I / (32 * V);  // accesses of a warp to a row
constexpr int THREADS = WARPS * 32;
#include "stream.cuh"

// The warp's outputs from its lanes' sums and their biases.
__device__ __forceinline__ void store(const float (&parts)[OUTS][R], const float (&offset)[OUTS], T* y, int first, int outputs) {
#pragma unroll
    for (int r = 0; r < R; r++) {
        float total[OUTS];
#pragma unroll
        for (int o = 0; o < OUTS; o++) total[o] = warp_sum(parts[o][r]) + offset[o];
        if (threadIdx.x % 32) continue;
        if (GATED)
            y[(long long)r * (outputs / 2) + first] = from_float<T>(gated<T, ACT>(total[0], total[OUTS - 1]));
        else
#pragma unroll
            for (int o = 0; o < OUTS; o++) y[(long long)r * outputs + first + o] = from_float<T>(total[o]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
gemv(const T* x, const T* weight, const T* bias, T* y, int outputs) {
    extern __shared__ uint4 memory[];
    uint4* xs = memory;
    int lane = threadIdx.x % 32;
    int warp = blockIdx.x * WARPS + threadIdx.x / 32, first = GATED ? warp : warp * OUTS;
    const Access* rows = (const Access*)(weight + (long long)first * I) + lane;
    const long long apart = GATED ? (long long)outputs / 2 * (I / V) : I / V;  // of a warp's rows
    Access ring[AHEAD][OUTS];
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
#pragma unroll
        for (int o = 0; o < OUTS; o++)
            if (u < STEPS) ring[u][o] = stream(rows + o * apart + u * 32);
    float offset[OUTS] = {};
    if constexpr (BIAS)
#pragma unroll
        for (int o = 0; o < OUTS; o++) offset[o] = to_float(bias[GATED ? first + o * (outputs / 2) : first + o]);
    grid_wait();
    launch_dependents();
    for (int i = threadIdx.x; i < R * I / V; i += THREADS) xs[i] = ((const uint4*)x)[i];
    __syncthreads();
    float parts[OUTS][R] = {};
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (s + u >= STEPS) break;
#pragma unroll
            for (int r = 0; r < R; r++) {
                uint4 at = xs[r * (I / V) + (s + u) * 32 + lane];
                unsigned a[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 p = unpack<T>(a[j]);
#pragma unroll
                    for (int o = 0; o < OUTS; o++) {
                        float2 w = unpack<T>(ring[u][o].u[j]);
                        parts[o][r] += p.x * w.x;
                        parts[o][r] += p.y * w.y;
                    }
                }
            }
            if (s + u + AHEAD < STEPS) {
#pragma unroll
                for (int o = 0; o < OUTS; o++) ring[u][o] = stream(rows + o * apart + (s + u + AHEAD) * 32);
            }
        }
    }
    store(parts, offset, y, first, outputs);
}
