// A row of N elements and a block of THREADS, V elements at a time; N is a multiple of V.

constexpr int PER = (N / V + THREADS - 1) / THREADS;  // vectors of a thread
typedef Vec<T, V> Piece;

// Whether the row has a vector threadIdx.x + i * THREADS; the compiler knows it of all i but the last.
__device__ inline bool within(int i) { return (i + 1) * THREADS <= N / V || threadIdx.x + i * THREADS < N / V; }

// Their sum, rounded.
__device__ inline Piece added(const Piece& a, const Piece& b) {
    Piece y;
#pragma unroll
    for (int j = 0; j < V; j++) y.x[j] = narrow<T>(wide(a.x[j]) + wide(b.x[j]));
    return y;
}

struct Weights {  // of this thread's vectors: threadIdx.x, + THREADS, ...
    Piece w[PER];

    __device__ Weights(const T* weight) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (within(i)) w[i] = ((const Piece*)weight)[threadIdx.x + i * THREADS];
    }
};

// Writes the norm of what `row` holds to `out`. A second call needs a barrier before.
__device__ inline void finish(const Piece (&row)[PER], const Weights& weights, T* out, float eps) {
    __shared__ float sums[32];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (within(i))
#pragma unroll
            for (int j = 0; j < V; j++) sum += wide(row[i].x[j]) * wide(row[i].x[j]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total += sums[i];
    float scale = rsqrtf(total / N + eps);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (within(i)) {
            Piece y;
#pragma unroll
            for (int j = 0; j < V; j++) y.x[j] = narrow<T>(wide(row[i].x[j]) * scale * wide(weights.w[i].x[j]));
            ((Piece*)out)[threadIdx.x + i * THREADS] = y;
        }
}
