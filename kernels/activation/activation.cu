// x [rows, 2 width] is gate beside up, out [rows, width]; width is a multiple of V. One row per blockIdx.y.

extern "C" __global__ void gated_activation(const T* x, T* out, int width) {
    typedef Vec<T, V> Piece;
    release();
    wait();
    int at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (at >= width) return;
    const T* row = x + (long long)blockIdx.y * 2 * width;
    Piece gate = *(const Piece*)(row + at), up = *(const Piece*)(row + width + at), y;
#pragma unroll
    for (int j = 0; j < V; j++) y.x[j] = narrow<T>(activated<T, ACT>(wide(gate.x[j]), wide(up.x[j])));
    *(Piece*)(out + (long long)blockIdx.y * width + at) = y;
}
