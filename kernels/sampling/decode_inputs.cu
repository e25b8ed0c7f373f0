// Inputs of a decode step, from what the host has sent and from the rows' block tables, which stay on the device.
// sent: n, and then columns of n: each row's index in `table`, its first token's id, its index in its sequence, the
// blocks that `table` holds of it, all its blocks, where in `fresh`, behind the columns, those begin that `table` lacks,
// by how much its position is another than its index, and the ids of its other QUERY - 1 tokens. An id of -1 is the first
// in the row of `last`, its newest token; -2 and so on are the next ones, drafts that were made behind it. The blocks are
// added to `table`. Rows from n on fill a captured batch up: of no token, whose embedding is zeros, they write no key and
// attend to nothing, and their row is -1.

extern "C" __global__ void decode_inputs(const int* sent, int* table, const T* last, T* ids, T* positions, T* slots,
                                         T* rows, int* lengths, int* tables, int table_row, int last_row,
                                         int block_size) {
    launch_dependents();
    grid_wait();
    int b = blockIdx.x, n = sent[0];
    if (b >= n) {
        if (threadIdx.x == 0) {
            for (int j = b * QUERY; j < (b + 1) * QUERY; j++) ids[j] = -1, positions[j] = 0, slots[j] = -1;
            rows[b] = -1, lengths[b] = 0;
        }
        return;
    }
    const int* column = sent + 1 + b;
    int row = column[0], given = column[n], position = column[2 * n], held = column[3 * n], blocks = column[4 * n];
    int* own = table + (long long)row * table_row;
    const int* fresh = sent + 1 + (6 + QUERY) * n + column[5 * n] - held;
    int at[QUERY];
    for (int j = 0; j < QUERY; j++) at[j] = (position + j) / block_size;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) {
        int block = i < held ? own[i] : fresh[i];
        if (i >= held) own[i] = block;
        tables[(long long)b * table_row + i] = block;
        for (int j = 0; j < QUERY; j++)
            if (i == at[j]) slots[b * QUERY + j] = (T)block * block_size + (position + j) % block_size;
    }
    if (threadIdx.x == 0) {
        for (int j = 0; j < QUERY; j++) {
            int id = j ? column[(6 + j) * n] : given;
            ids[b * QUERY + j] = id < 0 ? last[(long long)row * last_row - 1 - id] : id;
        }
        for (int j = 0; j < QUERY; j++) positions[b * QUERY + j] = position + j + column[6 * n];
        rows[b] = row;
        lengths[b] = position + QUERY;
    }
}
