#include "row.cuh"

// Row (i, j) of x starts at i * outer + j * inner, of `width` rows j; out is contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const T* x, const T* weight, T* out, int width, int outer, int inner, float eps) {
    release();
    wait();
    const T* from = x + (long long)(blockIdx.x / width) * outer + (long long)(blockIdx.x % width) * inner;
    Piece row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (threadIdx.x + i * THREADS < N / V) row[i] = ((const Piece*)from)[threadIdx.x + i * THREADS];
    finish(row, weight, out + (long long)blockIdx.x * N, eps);
}

// residual += x, or x + other rounded where PARTS is 2; x = norm(residual)
extern "C" __global__ void __launch_bounds__(THREADS)
add_rms_norm(T* x, const T* other, T* residual, const T* weight, float eps) {
    release();
    wait();
    Piece* a = (Piece*)(x + (long long)blockIdx.x * N);
    const Piece* c = (const Piece*)(other + (long long)blockIdx.x * N);
    Piece* b = (Piece*)(residual + (long long)blockIdx.x * N);
    Piece row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= N / V) break;
        Piece p = a[at], q = b[at];
        if constexpr (PARTS == 2) {
            const Piece o = c[at];
#pragma unroll
            for (int j = 0; j < V; j++) p.x[j] = narrow<T>(wide(p.x[j]) + wide(o.x[j]));
        }
#pragma unroll
        for (int j = 0; j < V; j++) row[i].x[j] = narrow<T>(wide(p.x[j]) + wide(q.x[j]));
        b[at] = row[i];
    }
    finish(row, weight, (T*)a, eps);
}
