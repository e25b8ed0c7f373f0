// Layer norms: (x - mean) / deviation * weight + bias; WEIGHT and BIAS are set where these exist.

#include "row.cuh"

struct Affine {  // weight and bias of this thread's vectors: threadIdx.x, + THREADS, ...
    Vector w[PER], b[PER];

    __device__ Affine(const T* weight, const T* bias) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (in_row(i)) {
                if constexpr (WEIGHT) w[i] = ((const Vector*)weight)[threadIdx.x + i * THREADS];
                if constexpr (BIAS) b[i] = ((const Vector*)bias)[threadIdx.x + i * THREADS];
            }
    }
};

// Writes the norm of what `row` holds to `out`. The variance is of differences from the mean: that loses no precision.
__device__ inline void write_layer_norm(const Vector (&row)[PER], const Affine& affine, T* out, float eps) {
    __shared__ float sums[2][32];
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i))
#pragma unroll
            for (int j = 0; j < V; j++) sum += to_float(row[i].x[j]);
    float mean = block_sum(sum, sums[0]) / N;
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i))
#pragma unroll
            for (int j = 0; j < V; j++) {
                float d = to_float(row[i].x[j]) - mean;
                squares += d * d;
            }
    float scale = rsqrtf(block_sum(squares, sums[1]) / N + eps);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i)) {
            Vector y;
#pragma unroll
            for (int j = 0; j < V; j++) {
                float v = (to_float(row[i].x[j]) - mean) * scale;
                if constexpr (WEIGHT) v *= to_float(affine.w[i].x[j]);
                if constexpr (BIAS) v += to_float(affine.b[i].x[j]);
                y.x[j] = from_float<T>(v);
            }
            ((Vector*)out)[threadIdx.x + i * THREADS] = y;
        }
}

// Row (i, j) of x starts at i * outer + j * inner, of `width` rows j; weight and bias of row j at j * step. out is
// contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm(const T* x, const T* weight, const T* bias, T* out, int width, int outer, int inner, int step, float eps) {
    launch_dependents();
    const int j = blockIdx.x % width;
    const Affine affine(weight + (long long)j * step, bias + (long long)j * step);  // never written
    grid_wait();
    const T* from = x + (long long)(blockIdx.x / width) * outer + (long long)j * inner;
    Vector row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i)) row[i] = ((const Vector*)from)[threadIdx.x + i * THREADS];
    write_layer_norm(row, affine, out + (long long)blockIdx.x * N, eps);
}

// residual += x, or x + other rounded where PARTS is 2; x = norm(residual)
extern "C" __global__ void __launch_bounds__(THREADS)
add_layer_norm(T* x, const T* other, T* residual, const T* weight, const T* bias, float eps) {
    launch_dependents();
    const Affine affine(weight, bias);
    grid_wait();
    Vector row[PER];
    add_row<PARTS == 2>(row, x, other, residual);
    write_layer_norm(row, affine, x + (long long)blockIdx.x * N, eps);
}
