// The scale of a row in e4m3, max|x| / 448, by a block of THREADS.
#include "half2.cuh"

constexpr float SMALLEST = 1e-35f;  // a row that has nothing larger becomes zeros: 448 / most must not be infinite

// The largest of the block's.
__device__ inline float block_max(float most) {
    __shared__ float of_warps[THREADS / 32];
#pragma unroll
    for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) most = fmaxf(most, of_warps[w]);
    return most;
}

// The factor of elements before they are rounded. most: the row's largest.
__device__ inline float e4m3_factor(float most) { return most > SMALLEST ? 448 / most : 0; }
