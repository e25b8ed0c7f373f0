// The largest element of each row of x [rows, width], the first of equals: values [rows] f32, ids [rows]. NaN is passed
// over.
//
// gridDim.x <= 32 blocks share a row, V elements at a time; the last one to arrive compares what all have found in
// part_values, part_ids [rows, gridDim.x]. arrived [rows] is zero between calls.

struct Found {
    float value;
    int id;
};

__device__ inline Found better(Found a, Found b) {
    return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

__device__ inline Found warp_best(Found a) {
#pragma unroll
    for (int step = 16; step; step >>= 1)
        a = better(a, {__shfl_xor_sync(0xffffffffu, a.value, step), __shfl_xor_sync(0xffffffffu, a.id, step)});
    return a;
}

extern "C" __global__ void __launch_bounds__(256)
argmax(const T* x, int width, float* values, long long* ids, float* part_values, int* part_ids, int* arrived) {
    typedef Vec<T, V> Vector;
    __shared__ Found found[8];
    __shared__ bool last;
    launch_dependents();
    grid_wait();
    const int row = blockIdx.y, parts = gridDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Found none = {__uint_as_float(0xff800000u), width};
    const Vector* from = (const Vector*)(x + (long long)row * width);
    Found best = none;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < width / V; i += parts * 256) {
        Vector p = from[i];
#pragma unroll
        for (int j = 0; j < V; j++)
            if (to_float(p.x[j]) > best.value) best = {to_float(p.x[j]), i * V + j};
    }
    best = warp_best(best);
    if (lane == 0) found[warp] = best;
    __syncthreads();
    if (warp) return;
    best = warp_best(lane < 8 ? found[lane] : none);
    if (parts > 1) {
        if (lane == 0) {
            part_values[row * parts + blockIdx.x] = best.value;
            part_ids[row * parts + blockIdx.x] = best.id;
            __threadfence();
            last = atomicAdd(arrived + row, 1) == parts - 1;
            __threadfence();
        }
        __syncwarp();
        if (!last) return;
        best = none;
        if (lane < parts)
            best = {__ldcg(part_values + row * parts + lane), __ldcg(part_ids + row * parts + lane)};
        best = warp_best(best);
    }
    if (lane == 0) {
        values[row] = best.value;
        ids[row] = best.id < width ? best.id : 0;  // nothing but -inf and NaN
        if (parts > 1) arrived[row] = 0;
    }
}
