// What a decode step reads, from the one piece of memory that the host has sent: n, width, and then of each of n rows
// its sampler's row, its token's id (negative: the sampler's newest), its position, and `width` entries of its block
// table. Rows from n on fill a captured batch up: of no token, whose embedding is zeros, they write no key and attend
// to nothing.

extern "C" __global__ void decode_inputs(const int* sent, const T* last, T* ids, T* positions, T* slots, int* lengths,
                                         int* tables, int table_row, int block_size) {
    launch_dependents();
    grid_wait();
    int b = blockIdx.x, n = sent[0], width = sent[1];
    if (b >= n) {
        if (threadIdx.x == 0) ids[b] = -1, positions[b] = 0, slots[b] = -1, lengths[b] = 0;
        return;
    }
    const int* table = sent + 2 + 3 * n + (long long)b * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) tables[(long long)b * table_row + i] = table[i];
    if (threadIdx.x == 0) {
        int row = sent[2 + b], given = sent[2 + n + b], position = sent[2 + 2 * n + b];
        ids[b] = given < 0 ? last[row] : given;
        positions[b] = position;
        slots[b] = (T)table[position / block_size] * block_size + position % block_size;
        lengths[b] = position + 1;
    }
}
