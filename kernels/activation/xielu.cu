// xIELU of `count` vectors of x, in place.
extern "C" __global__ void xielu(T* x, int count, float positive, float negative, float beta) {
    typedef Vec<T, V> Vector;
    launch_dependents();
    grid_wait();
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    Vector v = ((const Vector*)x)[at];
#pragma unroll
    for (int j = 0; j < V; j++) {
        float f = to_float(v.x[j]);
        v.x[j] = from_float<T>((f > 0 ? positive * f * f : negative * (expm1f(f) - f)) + beta * f);
    }
    ((Vector*)x)[at] = v;
}
