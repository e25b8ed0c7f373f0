// Rows of tables.

// y [tokens, width] = scale * row ids[t] - start of table [rows, width], V elements a thread; zeros where the table has
// none. blockIdx.x: the token. A table may lie in pinned host memory: then all of a row is under way at once.
extern "C" __global__ void embed(const long long* ids, const T* table, T* y, int width, int start, int rows,
                                 float scale) {
    typedef Vec<T, V> Vector;
    launch_dependents();
    grid_wait();
    long long row = ids[blockIdx.x] - start;
    bool here = row >= 0 && row < rows;
    const Vector* from = (const Vector*)(table + (here ? row : 0) * width);
    Vector* to = (Vector*)(y + (long long)blockIdx.x * width);
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width / V) return;
    Vector values = here ? from[i] : Vector{};
#pragma unroll
    for (int j = 0; j < V; j++) values.x[j] = from_float<T>(to_float(values.x[j]) * scale);
    to[i] = values;
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
