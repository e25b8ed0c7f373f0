// Rows of tables, a block for each token.

// y [tokens, width] = scale * row ids[t] - start of table [rows, width], V elements at a time; zeros where the table has
// none.
extern "C" __global__ void embed(const long long* ids, const T* table, T* y, int width, int start, int rows,
                                 float scale) {
    typedef Vec<T, V> Vector;
    launch_dependents();
    grid_wait();
    long long row = ids[blockIdx.x] - start;
    bool here = row >= 0 && row < rows;
    const Vector* from = (const Vector*)(table + (here ? row : 0) * width);
    Vector* to = (Vector*)(y + (long long)blockIdx.x * width);
    for (int i = threadIdx.x; i < width / V; i += blockDim.x) {
        Vector row = here ? from[i] : Vector{};
#pragma unroll
        for (int j = 0; j < V; j++) row.x[j] = from_float<T>(to_float(row.x[j]) * scale);
        to[i] = row;
    }
}

// cos, sin [tokens, 2 half] f32 of row positions[t] of table [positions, 2, half]: both halves alike, the first of sin
// negated.
extern "C" __global__ void cos_sin(const long long* positions, const float* table, float* cos, float* sin, int half) {
    launch_dependents();
    grid_wait();
    const float* from = table + positions[blockIdx.x] * 2 * half;
    long long to = (long long)blockIdx.x * 2 * half;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float c = from[i], s = from[half + i];
        cos[to + i] = cos[to + half + i] = c;
        sin[to + i] = -s;
        sin[to + half + i] = s;
    }
}
