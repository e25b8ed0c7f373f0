// How threads share the weights of several experts, each of which has rows of its own.

#include <stdint.h>

constexpr int64_t READING = 3;  // rows that take about as long as reading the weights for them

// Which of a stack's weights is an expert's. `at`: int64 [experts]; null: its own number.
inline int64_t weight_of(const void* at, int64_t expert) { return at ? ((const int64_t*)at)[expert] : expert; }

// The rows of all experts, by `offsets` as each_block has it; null: there are no experts, but so many rows.
struct Rows {
    const int64_t first, last;
    Rows(const void* offsets, int64_t experts, int64_t rows)
        : first(offsets ? ((const int32_t*)offsets)[0] : 0), last(offsets ? ((const int32_t*)offsets)[experts] : rows) {}
};

constexpr int64_t DYNAMIC = 2;  // blocks for each thread that are taken one by one, but at most an eighth of all

// How many of an expert's blocks, the first of which begins at `at`, begin before `until`.
inline int64_t blocks_before(int64_t until, int64_t at, int64_t each, int64_t blocks) {
    const int64_t count = until > at ? (until - at + each - 1) / each : 0;
    return count < blocks ? count : blocks;
}

// Calls f(expert, block, first row, last row) for this thread's blocks. `offsets` [experts + 1]: where each expert's
// rows begin. A block is some outputs of an expert's weight; experts without rows have none. Most blocks are shared out
// at first, as neighbours, which are read as one stream. Threads that have done theirs take the last ones one by one,
// as cores that other processes use are slower. taken, int64: counts these; 0 before and after. Calls that may run at
// once need one each.
template <typename F>
inline void each_block(const int32_t* offsets, int64_t experts, int64_t blocks, void* taken, int part, int parts, F f) {
    int64_t all = 0, count = 0, at = 0, dynamic = 0;
    for (int64_t e = 0; e < experts; e++)
        if (offsets[e + 1] > offsets[e]) all += (offsets[e + 1] - offsets[e] + READING) * blocks, count += blocks;
    const int64_t some = parts > 1 && count ? DYNAMIC * parts * (all / count) : 0;
    const int64_t shared = all - (some < all / 8 ? some : all / 8);
    const Share share(shared, part, parts);
    for (int64_t e = 0; e < experts; e++) {
        if (offsets[e + 1] == offsets[e]) continue;
        const int64_t each = offsets[e + 1] - offsets[e] + READING, last = blocks_before(share.last, at, each, blocks);
        for (int64_t i = blocks_before(share.first, at, each, blocks); i < last; i++) f(e, i, offsets[e], offsets[e + 1]);
        dynamic += blocks - blocks_before(shared, at, each, blocks);
        at += each * blocks;
    }
    if (parts == 1) return;
    for (;;) {
        int64_t next = __atomic_fetch_add((int64_t*)taken, 1, __ATOMIC_RELAXED);
        if (next >= dynamic) {  // each thread finds this once, and the last one clears the counter
            if (next == dynamic + parts - 1) __atomic_store_n((int64_t*)taken, 0, __ATOMIC_RELAXED);
            return;
        }
        at = 0;
        for (int64_t e = 0; e < experts; e++) {
            if (offsets[e + 1] == offsets[e]) continue;
            const int64_t each = offsets[e + 1] - offsets[e] + READING, first = blocks_before(shared, at, each, blocks);
            if (next < blocks - first) {
                f(e, first + next, offsets[e], offsets[e + 1]);
                break;
            }
            next -= blocks - first;
            at += each * blocks;
        }
    }
}
