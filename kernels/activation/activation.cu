// x [rows, 2 width] is gate before up, out [rows, width]; width is a multiple of V. One row per blockIdx.y.

extern "C" __global__ void gated_activation(const T* x, T* out, int width) {
    typedef Vec<T, V> Vector;
    launch_dependents();
    grid_wait();
    int at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (at >= width) return;
    const T* row = x + (long long)blockIdx.y * 2 * width;
    Vector gate = *(const Vector*)(row + at), up = *(const Vector*)(row + width + at), y;
#pragma unroll
    for (int j = 0; j < V; j++) y.x[j] = from_float<T>(activated<T, ACT>(to_float(gate.x[j]), to_float(up.x[j])));
    *(Vector*)(out + (long long)blockIdx.y * width + at) = y;
}

// y = act(x) of `count` vectors; it may be x.
extern "C" __global__ void activation(const T* x, T* y, int count) {
    typedef Vec<T, V> Vector;
    launch_dependents();
    grid_wait();
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    Vector v = ((const Vector*)x)[at];
#pragma unroll
    for (int j = 0; j < V; j++) v.x[j] = from_float<T>(activated<T, ACT>(to_float(v.x[j]), 1.0f));
    ((Vector*)y)[at] = v;
}
