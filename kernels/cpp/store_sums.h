// How linears of quantised weights store a block's sums. simd.h comes before.

// y[m : m + R, o : o + WIDE * LANES] = sums, plus the bias where there is one, as far as there are outputs. `a` has y and
// bias in T, and outputs.
template <typename T, int R, int WIDE, typename Linear>
INLINE void store_sums(const Linear& a, int64_t m, int64_t o, const Vec (&sums)[R][WIDE]) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < WIDE; v++) {
            int64_t at = o + v * LANES, count = a.outputs - at;
            T* y = (T*)a.y + (m + r) * a.outputs + at;
            const T* bias = (const T*)a.bias + at;
            if (count >= LANES)
                store(y, a.bias ? sums[r][v] + load(bias) : sums[r][v]);
            else if (count > 0)
                store(y, a.bias ? sums[r][v] + load(bias, count) : sums[r][v], count);
        }
}
