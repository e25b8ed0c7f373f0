// One block of THREADS per row of N elements, V at a time; N is a multiple of V.

constexpr int PER = (N / V + THREADS - 1) / THREADS;  // vectors of a thread
typedef Vec<T, V> Piece;

// Writes the norm of what `row` holds (vectors threadIdx.x, + THREADS, ...) to `out`.
__device__ inline void finish(const Piece (&row)[PER], const T* weight, T* out, float eps) {
    __shared__ float sums[32];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (threadIdx.x + i * THREADS < N / V)
#pragma unroll
            for (int j = 0; j < V; j++) sum += wide(row[i].x[j]) * wide(row[i].x[j]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total += sums[i];
    float scale = rsqrtf(total / N + eps);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= N / V) break;
        Piece w = ((const Piece*)weight)[at], y;
#pragma unroll
        for (int j = 0; j < V; j++) y.x[j] = narrow<T>(wide(row[i].x[j]) * scale * wide(w.x[j]));
        ((Piece*)out)[at] = y;
    }
}

// Row (i, j) of x starts at i * outer + j * inner, of `width` rows j; out is contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const T* x, const T* weight, T* out, int width, int outer, int inner, float eps) {
    wait();
    release();
    const T* from = x + (long long)(blockIdx.x / width) * outer + (long long)(blockIdx.x % width) * inner;
    Piece row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (threadIdx.x + i * THREADS < N / V) row[i] = ((const Piece*)from)[threadIdx.x + i * THREADS];
    finish(row, weight, out + (long long)blockIdx.x * N, eps);
}

// residual += x; x = norm(residual)
extern "C" __global__ void __launch_bounds__(THREADS) add_rms_norm(T* x, T* residual, const T* weight, float eps) {
    wait();
    release();
    Piece* a = (Piece*)(x + (long long)blockIdx.x * N);
    Piece* b = (Piece*)(residual + (long long)blockIdx.x * N);
    Piece row[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= N / V) break;
        Piece p = a[at], q = b[at];
#pragma unroll
        for (int j = 0; j < V; j++) row[i].x[j] = narrow<T>(wide(p.x[j]) + wide(q.x[j]));
        b[at] = row[i];
    }
    finish(row, weight, (T*)a, eps);
}
