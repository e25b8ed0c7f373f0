// One block of THREADS per row of N elements, V at a time; N is a multiple of V.

constexpr int PER = (N / V + THREADS - 1) / THREADS;  // vectors of a thread
typedef Vec<T, V> Piece;

// Writes the norm of what `row` holds (vectors threadIdx.x, + THREADS, ...) to `out`. A second call needs a barrier before.
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
