// Blocks of many tensors, and rows that have a block's part of each, one after the other.

// part [tensors, 3]: where each tensor [blocks, length] lies, its length, and where its part of a row begins; lengths in
// accesses of V elements. rows [n, width]: of blocks ids [n]. With SPREAD rows become blocks, else blocks become rows.
// With OTHERS blocks of these numbers [n] become copies of those. gridDim.z blocks of threads copy one part of one row.
// What comes next starts when all is copied: it may read a cache before its own grid_wait().
extern "C" __global__ void __launch_bounds__(THREADS)
block_rows(const long long* part, T* rows, const long long* ids, const long long* others, int width) {
    typedef Vec<T, V> Vector;
    grid_wait();
    part += blockIdx.y * 3;
    const int length = (int)part[1];
    Vector* const block = (Vector*)part[0] + ids[blockIdx.x] * length;
    Vector* const row = OTHERS ? (Vector*)part[0] + others[blockIdx.x] * length
                               : (Vector*)rows + (long long)blockIdx.x * width + part[2];
    Vector* const to = SPREAD ? block : row;
    const Vector* const from = SPREAD ? row : block;
    for (int i = blockIdx.z * THREADS + threadIdx.x; i < length; i += gridDim.z * THREADS) to[i] = from[i];
}
