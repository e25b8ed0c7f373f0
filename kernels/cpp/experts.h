// How threads share the weights of several experts, each of which has rows of its own.

#include <stdint.h>

constexpr int64_t READING = 3;  // rows that take about as long as reading the weights for them

// Which of a stack's weights is an expert's. `at`: int64 [experts]; null: its own number.
inline int64_t weight_of(const void* at, int64_t expert) { return at ? ((const int64_t*)at)[expert] : expert; }

// Calls f(expert, block, first row, last row) for this thread's blocks. `ends` [experts + 1]: where each expert's rows
// begin. A block is some outputs of an expert's weight; experts without rows have none.
template <typename F>
inline void each_block(const int32_t* ends, int64_t experts, int64_t blocks, int part, int parts, F f) {
    int64_t all = 0, at = 0;
    for (int64_t e = 0; e < experts; e++)
        if (ends[e + 1] > ends[e]) all += (ends[e + 1] - ends[e] + READING) * blocks;
    const Share share(all, part, parts);
    for (int64_t e = 0; e < experts && at < share.last; e++) {
        if (ends[e + 1] == ends[e]) continue;
        const int64_t each = ends[e + 1] - ends[e] + READING;
        // Blocks that begin within the share.
        int64_t first = share.first > at ? (share.first - at + each - 1) / each : 0, last = (share.last - at + each - 1) / each;
        last = last < blocks ? last : blocks;
        for (int64_t i = first; i < last; i++) f(e, i, ends[e], ends[e + 1]);
        at += each * blocks;
    }
}
