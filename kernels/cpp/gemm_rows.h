// GEMMs of a few rows: weights are read once, as they lie, and sums are f32. Included after op.h and simd.h.
//
// A tile is a few rows of x times four or eight outputs, summed along the inputs in vectors. It asks for as many rows of
// the weight that come next meanwhile, as what a core reads from memory is bounded by how much of it is under way; the
// tiles of further rows find their weights in the cache. Measured on a core with AVX-512, another one busy, of weights in
// pages of 4 KB (and of 2 MB): eight outputs at a time 22 (24) GB/s, four or sixteen 19 (21), one 16 (25 with asking).

struct Linear {
    const void *x, *weight, *bias;  // bias: null where there is none
    void* y;
    int64_t rows, inputs, outputs, pitch;  // pitch: elements from row to row of x
};

constexpr int BLOCK = 8;  // outputs that a thread computes for all rows before it goes on
// 4 x 4 or 3 x 8 sums, an x for each row and a weight in 32 registers, 2 x 4 or 1 x 8 in 16.
constexpr int ROWS = MANY_REGISTERS ? 4 : 2;

// The unit of one multiply-add: LANES elements, or pairs of them where the processor multiplies bf16 itself.
template <typename T, typename W> struct Step {
    static constexpr int COUNT = LANES;
    typedef Vec Piece;
    template <typename E> static INLINE Piece get(const E* p) { return load(p); }
    template <typename E> static INLINE Piece get(const E* p, int64_t count) { return load(p, count); }
    static INLINE Vec add(Vec total, Piece a, Piece b) { return a * b + total; }
};
#if defined(DOT_BF16)
template <> struct Step<bf16, bf16> {
    static constexpr int COUNT = 2 * LANES;
    typedef Bf16s Piece;
    static INLINE Piece get(const bf16* p) { return load_bf16s(p); }
    static INLINE Piece get(const bf16* p, int64_t count) { return load_bf16s(p, count); }
    static INLINE Vec add(Vec total, Piece a, Piece b) { return dot_bf16s(total, a, b); }
};
#endif

template <int R, int OUTS, typename T, typename W>
INLINE void tile(const T* x, int64_t pitch, const W* w, int64_t inputs, const W* ahead, float (&out)[R][OUTS]) {
    typedef Step<T, W> S;
    Vec total[R][OUTS] = {};
    int64_t i = 0;
    for (; i + S::COUNT <= inputs; i += S::COUNT) {
        typename S::Piece values[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) values[r] = S::get(x + r * pitch + i);
#pragma GCC unroll 8
        for (int o = 0; o < OUTS; o++) {
            if (ahead) __builtin_prefetch(ahead + o * inputs + i, 0, 2);
            typename S::Piece weight = S::get(w + o * inputs + i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) total[r][o] = S::add(total[r][o], values[r], weight);
        }
    }
    if (i < inputs)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int o = 0; o < OUTS; o++)
                total[r][o] = S::add(total[r][o], S::get(x + r * pitch + i, inputs - i),
                                     S::get(w + o * inputs + i, inputs - i));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int o = 0; o < OUTS; o += 4) sums(total[r] + o, out[r] + o);
}

// y[m : m + R, o : o + OUTS]
template <int R, int OUTS, typename T, typename Out, typename W>
INLINE void outputs(const Linear& a, int64_t m, int64_t o, const W* ahead) {
    float out[R][OUTS];
    tile<R, OUTS>((const T*)a.x + m * a.pitch, a.pitch, (const W*)a.weight + o * a.inputs, a.inputs, ahead, out);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < OUTS; i++) {
            float bias = a.bias ? widen(((const T*)a.bias)[o + i]) : 0;
            ((Out*)a.y)[(m + r) * a.outputs + o + i] = narrow<Out>(out[r][i] + bias);
        }
}

// A block's outputs of all rows. ahead: the next block's weights, null where there is none.
template <typename T, typename Out = T, typename W = T> void block(const Linear& a, int64_t o, const W* ahead) {
    int64_t m = 0;
    for (; m + ROWS <= a.rows; m += ROWS, ahead = nullptr) {
        outputs<ROWS, 4, T, Out, W>(a, m, o, ahead);
        outputs<ROWS, 4, T, Out, W>(a, m, o + 4, ahead ? ahead + 4 * a.inputs : nullptr);
    }
    switch (a.rows - m) {
        case 3:
            if constexpr (ROWS > 3) return outputs<3, BLOCK, T, Out, W>(a, m, o, ahead);
            break;
        case 2:
            if constexpr (ROWS > 2) return outputs<2, BLOCK, T, Out, W>(a, m, o, ahead);
            break;
        case 1: return outputs<1, BLOCK, T, Out, W>(a, m, o, ahead);
    }
}

// Fewer than BLOCK outputs at the end of the weight: four, if there are, and then one by one.
template <typename T, typename Out = T, typename W = T> void last_outputs(const Linear& a, int64_t o) {
    if (o + 4 <= a.outputs) {
        for (int64_t m = 0; m < a.rows; m++) outputs<1, 4, T, Out, W>(a, m, o, nullptr);
        o += 4;
    }
    for (; o < a.outputs; o++)
        for (int64_t m = 0; m < a.rows; m++) {
            const T* x = (const T*)a.x + m * a.pitch;
            const W* w = (const W*)a.weight + o * a.inputs;
            float total = a.bias ? widen(((const T*)a.bias)[o]) : 0;
            for (int64_t i = 0; i < a.inputs; i++) total += widen(x[i]) * widen(w[i]);
            ((Out*)a.y)[m * a.outputs + o] = narrow<Out>(total);
        }
}

// A thread's share of the outputs. Out and W: the types of y and of the weight, where they are not that of x.
template <typename T, typename Out = T, typename W = T> void linear(const Linear& a, int part, int parts) {
    int64_t blocks = a.outputs / BLOCK;
    Share share(blocks, part, parts);
    for (int64_t i = share.first; i < share.last; i++) {
        const W* next = (const W*)a.weight + (i + 1) * BLOCK * a.inputs;
        block<T, Out, W>(a, i * BLOCK, i + 1 < share.last ? next : nullptr);
    }
    if (part == parts - 1) last_outputs<T, Out, W>(a, blocks * BLOCK);
}
