// How a GEMM of small M stores a tile, once PARTIAL sums of each of its values are in shared memory.

__device__ inline float total(const float* sums, int out, int row, const T* bias) {
    float y = BIAS ? to_float(*bias) : 0;
#pragma unroll
    for (int k = 0; k < PARTIAL; k++) y += sums[(k * M + out) * WIDE + row];
    return y;
}

// first: the tile's first output of y [rows, width].
__device__ inline void store(const float* sums, const T* bias, T* y, int first, int width, int rows) {
    for (int i = threadIdx.x; i < rows * OUTS; i += THREADS) {
        const int row = i / OUTS, out = i % OUTS, column = first + out;
        if (UNEVEN && column >= width) continue;
        float value = total(sums, out, row, bias + column);
        if (GATED) value = gated<T, ACT>(value, total(sums, OUTS + out, row, bias + width + column));
        y[(long long)row * width + column] = from_float<T>(value);
    }
}
