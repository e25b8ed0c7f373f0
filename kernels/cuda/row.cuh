// A row of N elements and a block of THREADS, V elements at a time; N is a multiple of V.

constexpr int PER = (N / V + THREADS - 1) / THREADS;  // vectors of a thread
typedef Vec<T, V> Vector;

// Whether the row has a vector threadIdx.x + i * THREADS; the compiler knows it of all i but the last.
__device__ inline bool in_row(int i) { return (i + 1) * THREADS <= N / V || threadIdx.x + i * THREADS < N / V; }

// Their sum, rounded.
__device__ inline Vector add(const Vector& a, const Vector& b) {
    Vector y;
#pragma unroll
    for (int j = 0; j < V; j++) y.x[j] = from_float<T>(to_float(a.x[j]) + to_float(b.x[j]));
    return y;
}

struct Weights {  // of this thread's vectors: threadIdx.x, + THREADS, ...
    Vector w[PER];

    __device__ Weights(const T* weight) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (in_row(i)) w[i] = ((const Vector*)weight)[threadIdx.x + i * THREADS];
    }
};

// residual += x, or x + other rounded where there are two; `row` becomes the residual. COUNT: rows of x, of which x is the
// sum, rounded. pitch: elements from one row of `other` to the next.
template <bool TWO, int COUNT = 1>
__device__ inline void add_row(Vector (&row)[PER], const T* x, const T* other, T* residual, int pitch = N) {
    const Vector* a = (const Vector*)(x + (long long)blockIdx.x * COUNT * N);
    const Vector* c = (const Vector*)(other + (long long)blockIdx.x * pitch);
    Vector* b = (Vector*)(residual + (long long)blockIdx.x * N);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = threadIdx.x + i * THREADS;
        if (!in_row(i)) break;
        Vector p = a[at], q = b[at];
        if constexpr (COUNT > 1) {
            float sums[V];
#pragma unroll
            for (int j = 0; j < V; j++) sums[j] = to_float(p.x[j]);
#pragma unroll
            for (int t = 1; t < COUNT; t++) {
                const Vector term = a[t * (N / V) + at];
#pragma unroll
                for (int j = 0; j < V; j++) sums[j] += to_float(term.x[j]);
            }
#pragma unroll
            for (int j = 0; j < V; j++) p.x[j] = from_float<T>(sums[j]);
        }
        if constexpr (TWO) {
            const Vector o = c[at];
            p = add(p, o);
        }
        b[at] = row[i] = add(p, q);
    }
}

// The sum over the block; `sums` is shared memory of its own for each call.
__device__ inline float block_sum(float x, float* sums) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total += sums[i];
    return total;
}

// 1 / rms of what `row` holds. A second call needs a barrier before.
__device__ inline float inverse_rms(const Vector (&row)[PER], float eps) {
    __shared__ float sums[32];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i))
#pragma unroll
            for (int j = 0; j < V; j++) sum += to_float(row[i].x[j]) * to_float(row[i].x[j]);
    return rsqrtf(block_sum(sum, sums) / N + eps);
}

__device__ inline Vector scaled(const Vector& x, float scale, const Vector& weight) {
    Vector y;
#pragma unroll
    for (int j = 0; j < V; j++) y.x[j] = from_float<T>(to_float(x.x[j]) * scale * to_float(weight.x[j]));
    return y;
}

// Writes the norm of what `row` holds to `out`, as inverse_rms().
__device__ inline void write_norm(const Vector (&row)[PER], const Weights& weights, T* out, float eps) {
    const float scale = inverse_rms(row, eps);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (in_row(i)) ((Vector*)out)[threadIdx.x + i * THREADS] = scaled(row[i], scale, weights.w[i]);
}
