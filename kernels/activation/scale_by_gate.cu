// x [tokens, WIDTH] times the sigmoid of h [tokens, N] . weight [N], which is rounded as a linear's output; a block a
// token.
#include "row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) scale_by_gate(T* x, const T* h, const T* weight) {
    __shared__ float sums[32];
    launch_dependents();
    const Weights weights(weight);  // they come from memory, unlike what the kernel before has made
    grid_wait();
    const Vector* const row = (const Vector*)(h + (long long)blockIdx.x * N);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (!in_row(i)) break;
        const Vector one = row[threadIdx.x + i * THREADS];
#pragma unroll
        for (int j = 0; j < V; j++) sum += to_float(one.x[j]) * to_float(weights.w[i].x[j]);
    }
    const float by = 1 / (1 + expf(-to_float(from_float<T>(block_sum(sum, sums)))));
    Vector* const mine = (Vector*)(x + (long long)blockIdx.x * WIDTH);
    for (int i = threadIdx.x; i < WIDTH / V; i += THREADS) {
        Vector one = mine[i];
#pragma unroll
        for (int j = 0; j < V; j++) one.x[j] = from_float<T>(to_float(one.x[j]) * by);
        mine[i] = one;
    }
}
