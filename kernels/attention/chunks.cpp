// Rows of chunks.py for sequences that decode: each of their tokens, with the blocks of its chunk and how many tokens of
// it there are. A recorded step is replayed with other lengths.

#include "op.h"

struct Chunks {
    const int32_t *tables, *lengths;  // [sequences, entries], pitch apart; [sequences]
    int32_t *own, *seen;              // [sequences * query_len, width], [sequences * query_len]
    int64_t sequences, query_len, chunk, block_size, pitch, entries, width;
};

static void chunks(const Chunks& a, int part, int) {
    if (part) return;
    for (int64_t row = 0; row < a.sequences * a.query_len; row++) {
        int64_t sequence = row / a.query_len, length = a.lengths[sequence] - a.query_len + 1 + row % a.query_len;
        int64_t before = length > 0 ? (length - 1) / a.chunk * a.chunk : 0, first = before / a.block_size;
        const int32_t* table = a.tables + sequence * a.pitch + first;
        for (int64_t i = 0; i < a.width; i++) a.own[row * a.width + i] = first + i < a.entries ? table[i] : 0;
        a.seen[row] = length > 0 ? length - before : 0;
    }
}

OP(chunks, chunks, Chunks)
