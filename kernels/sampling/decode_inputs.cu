// What a decode step reads, from what the host has sent and from the rows' block tables, which stay on the device.
// sent: n, and then columns of n: each row's index in `table`, its token's id (negative: the newest in `last`), its
// position, the blocks that `table` holds of it, all its blocks, and where in `fresh`, behind the columns, those begin
// that `table` lacks. They are added to it. Rows from n on fill a captured batch up: of no token, whose embedding is
// zeros, they write no key and attend to nothing, and their row is -1.

extern "C" __global__ void decode_inputs(const int* sent, int* table, const T* last, T* ids, T* positions, T* slots,
                                         T* rows, int* lengths, int* tables, int table_row, int block_size) {
    launch_dependents();
    grid_wait();
    int b = blockIdx.x, n = sent[0];
    if (b >= n) {
        if (threadIdx.x == 0) ids[b] = -1, positions[b] = 0, slots[b] = -1, rows[b] = -1, lengths[b] = 0;
        return;
    }
    const int* column = sent + 1 + b;
    int row = column[0], given = column[n], position = column[2 * n], held = column[3 * n], blocks = column[4 * n];
    int* own = table + (long long)row * table_row;
    const int* fresh = sent + 1 + 6 * n + column[5 * n] - held;
    int at = position / block_size;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) {
        int block = i < held ? own[i] : fresh[i];
        if (i >= held) own[i] = block;
        tables[(long long)b * table_row + i] = block;
        if (i == at) slots[b] = (T)block * block_size + position % block_size;
    }
    if (threadIdx.x == 0) {
        ids[b] = given < 0 ? last[row] : given;
        positions[b] = position;
        rows[b] = row;
        lengths[b] = position + 1;
    }
}
