// Logits x [rows, width] in place: softcap * tanh(scale * x / softcap), or scale * x without a soft cap; -inf from column
// `present` on. width is a multiple of V. One row per blockIdx.y.

extern "C" __global__ void finish(T* x, int width, int present, float scale, float softcap) {
    typedef Vec<T, V> Vector;
    launch_dependents();
    grid_wait();
    int at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (at >= width) return;
    Vector* to = (Vector*)(x + (long long)blockIdx.y * width + at);
    Vector y = *to;
    float before = softcap ? scale / softcap : scale;
#pragma unroll
    for (int j = 0; j < V; j++) {
        float z = to_float(y.x[j]) * before;
        if (softcap) z = tanhf(z) * softcap;
        y.x[j] = from_float<T>(at + j < present ? z : -__int_as_float(0x7f800000));
    }
    *to = y;
}
