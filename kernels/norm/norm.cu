#include "row.cuh"

// Row (i, j) of x starts at i * outer + j * inner, of `width` rows j; out is contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const T* x, const T* weight, T* out, int width, int outer, int inner, float eps) {
    release();
    const Weights weights(weight);  // they come from memory, unlike what the kernel before has made
    wait();
    const T* from = x + (long long)(blockIdx.x / width) * outer + (long long)(blockIdx.x % width) * inner;
    Piece row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (within(i)) row[i] = ((const Piece*)from)[threadIdx.x + i * THREADS];
    finish(row, weights, out + (long long)blockIdx.x * N, eps);
}

// residual += x, or x + other rounded where PARTS is 2; x = norm(residual)
extern "C" __global__ void __launch_bounds__(THREADS)
add_rms_norm(T* x, const T* other, T* residual, const T* weight, float eps) {
    release();
    const Weights weights(weight);
    wait();
    Piece* a = (Piece*)(x + (long long)blockIdx.x * N);
    const Piece* c = (const Piece*)(other + (long long)blockIdx.x * N);
    Piece* b = (Piece*)(residual + (long long)blockIdx.x * N);
    Piece row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = threadIdx.x + i * THREADS;
        if (!within(i)) break;
        Piece p = a[at], q = b[at];
        if constexpr (PARTS == 2) {
            const Piece o = c[at];
            p = added(p, o);
        }
        b[at] = row[i] = added(p, q);
    }
    finish(row, weights, (T*)a, eps);
}
