#include "row.cuh"

// Row (i, j) of x starts at i * outer + j * inner, of `width` rows j; out is contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const T* x, const T* weight, T* out, int width, int outer, int inner, float eps) {
    launch_dependents();
    const Weights weights(weight);  // they come from memory, unlike what the kernel before has made
    grid_wait();
    const T* from = x + (long long)(blockIdx.x / width) * outer + (long long)(blockIdx.x % width) * inner;
    Vector row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i)) row[i] = ((const Vector*)from)[threadIdx.x + i * THREADS];
    write_norm(row, weights, out + (long long)blockIdx.x * N, eps);
}

// residual += x, or x + other rounded where PARTS is 2; x = norm(residual)
extern "C" __global__ void __launch_bounds__(THREADS)
add_rms_norm(T* x, const T* other, T* residual, const T* weight, float eps) {
    launch_dependents();
    const Weights weights(weight);
    grid_wait();
    Vector row[PER];
    add_row<PARTS == 2>(row, x, other, residual);
    write_norm(row, weights, x + (long long)blockIdx.x * N, eps);
}

// residual += the sum of TERMS rows, rounded, or of that and other, rounded, where PARTS is 2; out = norm(residual).
// pitch: elements from one row of other to the next; 0: it is one row for all.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_add_rms_norm(const T* terms, const T* other, int pitch, T* residual, const T* weight, T* out, float eps) {
    launch_dependents();
    const Weights weights(weight);
    grid_wait();
    Vector row[PER];
    add_row<PARTS == 2, TERMS>(row, terms, other, residual, pitch);
    write_norm(row, weights, out + (long long)blockIdx.x * N, eps);
}

// residual += norm(x), rounded; x = norm(residual), of other weights
extern "C" __global__ void __launch_bounds__(THREADS)
norm_add_norm(T* x, T* residual, const T* post_weight, const T* weight, float post_eps, float eps) {
    launch_dependents();
    const Weights post(post_weight), weights(weight);
    grid_wait();
    Vector* a = (Vector*)(x + (long long)blockIdx.x * N);
    Vector* b = (Vector*)(residual + (long long)blockIdx.x * N);
    Vector row[PER], old[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i)) row[i] = a[threadIdx.x + i * THREADS], old[i] = b[threadIdx.x + i * THREADS];
    const float scale = inverse_rms(row, post_eps);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i)) b[threadIdx.x + i * THREADS] = row[i] = add(scaled(row[i], scale, post.w[i]), old[i]);
    __syncthreads();
    write_norm(row, weights, (T*)a, eps);
}
