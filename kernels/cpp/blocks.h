// y [M, O] = x [M, I] times the transpose of a weight [O, I] of quantised codes, plus a bias [O]; sums are f32.
// Included after op.h and simd.h.
//
// A weight is (code - zero) * scale, minus a minimum where its form has any. It lies in blocks of 16 outputs, whose
// groups of `super` inputs follow each other: a thread reads one stream of memory. A group is a head of its own, and of
// each 32 inputs the codes, four inputs of each output side by side: VNNI multiplies and adds such fours of bytes with
// x in int8 planes (int8_planes.h), for 16 outputs at once, NEON's dot products for 4, and so do the tiles of AMX, for
// 16 rows at once. What is added of a group is exact, so all make the same to the last bit. AVX2 without VNNI
// multiplies and adds pairs: the first two int8 planes as one number, which makes the same where x is bf16. Elsewhere
// codes are converted to f32, and with AVX2 for three and more rows of f32: of so many that takes fewer instructions.
//
// A form is a class of the source that includes this: Blocks below, and
//     GROUPS         of 32 inputs, 1 or 2, that have numbers of their own
//     MINIMA         whether there are minima
//     scale(h, v)    of group h of these 32 inputs, for outputs v * LANES.. of the block
//     minimum(h, v)
//     four(i, v)     codes, bytes that are not negative, of inputs 4 i.. of those outputs

#include "int8_planes.h"
#include "store_sums.h"
#include "experts.h"
#include "tiles.h"

struct Linear {
    const void *x, *planes, *blocks, *bias;  // bias: null where there is none
    void* y;
    int64_t rows, inputs, outputs, pitch;  // pitch: elements from row to row of x
    int64_t super, zero;                   // inputs of a group; what all codes have too much
};

// The weights of several experts, one after the other, each with rows of x of its own.
struct Experts {
    const void *x, *planes, *blocks, *bias, *offsets, *at;  // bias [experts, outputs]; offsets: as each_block has it; at: weight_of
    void *taken, *y;  // taken: as each_block has it
    int64_t experts, inputs, outputs, pitch, super, zero;
};

struct Dequantize {
    const void* blocks;
    void* y;
    int64_t inputs, outputs, super, zero;
};

// Outputs by their numbers, as an embedding table's.
struct TakeRows {
    const int64_t* ids;
    const void* blocks;
    void* y;  // y[t] = weight[ids[t] - start] * by, zeros where there is no such output
    int64_t count, inputs, outputs, super, zero, start;
    double by;
};

constexpr int BLOCK = 16;                 // outputs
constexpr int AHEAD = 4096;               // bytes from what is read to what is asked for
constexpr int WIDE = BLOCK / LANES;       // vectors of a block's outputs
constexpr int ROWS = LANES == 4 ? 2 : 4;  // rows at once: their sums and what is added to them, in registers

// Layout of a block: a head of HEAD bytes for each group, and BYTES for 32 inputs.
template <int HEAD, int BYTES> struct Blocks {
    const uint8_t *head, *run;
    int64_t each, left;  // runs of a group; of this one

    INLINE Blocks(const uint8_t* w, int64_t super) : head(w), run(w + HEAD), each(super / RUN), left(super / RUN) {}
    INLINE void next() {
        run += BYTES;
        if (--left == 0) head = run, run += HEAD, left = each;
    }
    INLINE void ask() const {
        for (int i = 0; i < BYTES + HEAD; i += 64) __builtin_prefetch(run + AHEAD + i, 0, 2);
    }
    static INLINE int64_t bytes(int64_t inputs, int64_t super) { return inputs / super * (HEAD + super / RUN * BYTES); }
};

// Codes of 8 bits at p, or of 4 bits, those of the second 16 inputs above those of the first. Codes of 6 bits: so the
// lower 4, then the upper 2: of fours i, i + 4, i + 1 and i + 5 in a byte, one above the other.
template <int BITS> INLINE Ints four_codes(const uint8_t* p, int i, int v) {
    if (BITS == 8) return *(const IntsAnywhere*)(p + i * 64 + 4 * v * LANES);
    const Ints lower = (*(const IntsAnywhere*)(p + i % 4 * 64 + 4 * v * LANES) >> (i < 4 ? 0 : 4)) & 0x0f0f0f0f;
    if (BITS == 4) return lower;
    const Ints upper = *(const IntsAnywhere*)(p + 256 + i % 4 / 2 * 64 + 4 * v * LANES);
    const int up = 4 - i / 4 * 2 - i % 2 * 4;
    return lower | ((up > 0 ? upper << up : upper >> -up) & 0x30303030);
}

// Numbers v * LANES.. of sixteen of f16.
INLINE Vec halves(const uint8_t* p, int v) { return load((const f16*)p + v * LANES); }

// Adds what a group of a row makes, of its int8 planes' dot products: the first int8 planes' as `low`, with 256 times
// the second.
template <typename F, typename T>
INLINE void accumulate(Vec& total, Ints low, Ints high, Vec scale, Vec minimum, const Sums& of, int h) {
    Vec sums = __builtin_convertvector(low, Vec);
    if (PLANES<T> == 3) sums += __builtin_convertvector(high, Vec) * 65536;
    total += sums * (scale * of.scale);
    if (F::MINIMA) total -= minimum * (F::GROUPS == 2 ? of.sums[h] : of.sums[0] + of.sums[1]);
}

// The surplus that the zeros of a group's codes have added: low or high.
template <typename F> INLINE int32_t too_much(const int32_t (&of)[2], int32_t zero, int h) {
    return zero * (F::GROUPS == 2 ? of[h] : of[0] + of[1]);
}

INLINE Ints fill_whole(int32_t x) { return x - (Ints){}; }
INLINE Ints four_bytes(const uint8_t* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return fill_whole(x);
}

// The dot products of a group, for LANES outputs and one row. begin: what zeros make too much, negative. add: of four
// inputs from n on; x: the row.
#if defined(DOT_FOURS)
typedef Ints Codes;
template <typename F> INLINE Codes four(const F& at, int i, int v) { return at.four(i, v); }

template <typename T> struct Dots {
    Ints planes[PLANES<T>];

    INLINE void begin(int32_t low, int32_t high) {
        planes[0] = fill_whole(low), planes[1] = Ints{};
        if (PLANES<T> == 3) planes[PLANES<T> - 1] = fill_whole(high);
    }
    INLINE void add(Ints codes, const uint8_t* x, int64_t n, int64_t inputs) {
#pragma GCC unroll 3
        for (int d = 0; d < PLANES<T>; d++)
            planes[d] = dot_fours(planes[d], codes, four_bytes(x + d * inputs + n));
    }
    INLINE Ints low() const { return (planes[1] << 8) + planes[0]; }
    INLINE Ints high() const { return planes[PLANES<T> - 1]; }
};
#elif defined(DOT_PAIRS)
typedef uint16_t Halves __attribute__((vector_size(LANES * 4), may_alias));

struct Codes {
    Ints all, first, second;  // first: of each four the first and the third, of 16 bits; second: the others
};
template <typename F> INLINE Codes four(const F& at, int i, int v) {
    const Ints all = at.four(i, v);
    return {all, all & 0x00ff00ff, (Ints)((Halves)all >> 8)};
}

template <typename T> struct Dots {
    Ints sums[2];

    INLINE void begin(int32_t low, int32_t high) { sums[0] = fill_whole(low), sums[1] = fill_whole(high); }
    INLINE void add(const Codes& codes, const uint8_t* x, int64_t n, int64_t inputs) {
        sums[0] += dot_pairs(codes.first, four_bytes(x + 2 * n)) + dot_pairs(codes.second, four_bytes(x + 2 * n + 4));
        // Third int8 planes are 64 at most, so that two products of theirs are less than 2^15.
        if (PLANES<T> == 3) sums[1] += dot_pairs(dot_bytes(codes.all, four_bytes(x + 2 * inputs + n)), fill_whole(0x10001));
    }
    INLINE Ints low() const { return sums[0]; }
    INLINE Ints high() const { return sums[1]; }
};
#endif

// A block of outputs for rows m..m + R - 1.
#if defined(DOT_FOURS) || defined(DOT_PAIRS)
template <int R, typename F, typename T>
INLINE void whole_tile(const Linear& a, int64_t m, const uint8_t* w, Vec (&total)[R][WIDE]) {
    constexpr int FOURS = RUN / 4 / F::GROUPS;
    const int64_t pitch = row_bytes<T>(a.inputs), runs = a.inputs / RUN;
    const uint8_t *x = (const uint8_t*)a.planes + m * pitch, *of = (const uint8_t*)sums_of<T>(x, a.inputs);
    F at(w, a.super);
    for (int64_t g = 0; g < runs; g++, of += sizeof(Sums), at.next()) {
        at.ask();
#pragma GCC unroll 2
        for (int h = 0; h < F::GROUPS; h++) {
            Dots<T> dots[R][WIDE];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const Sums& one = *(const Sums*)(of + r * pitch);
                for (int v = 0; v < WIDE; v++)
                    dots[r][v].begin(-too_much<F>(one.low, a.zero - FOURS_LESS, h),
                                     -too_much<F>(one.high, a.zero - FOURS_LESS, h));
            }
#pragma GCC unroll 8
            for (int i = h * FOURS; i < h * FOURS + FOURS; i++) {
                Codes codes[WIDE];
#pragma GCC unroll 2
                for (int v = 0; v < WIDE; v++) codes[v] = four(at, i, v);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < WIDE; v++) dots[r][v].add(codes[v], x + r * pitch, g * RUN + i * 4, a.inputs);
            }
#pragma GCC unroll 2
            for (int v = 0; v < WIDE; v++) {
                const Vec scale = at.scale(h, v), minimum = at.minimum(h, v);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    accumulate<F, T>(total[r][v], dots[r][v].low(), dots[r][v].high(), scale, minimum,
                                     *(const Sums*)(of + r * pitch), h);
            }
        }
    }
}
#endif

template <int R, typename F, typename T>
INLINE void float_tile(const Linear& a, int64_t m, const uint8_t* w, Vec (&total)[R][WIDE]) {
    constexpr int G = F::MINIMA ? 2 : F::GROUPS;  // halves of a run whose sums of x are apart
    const int64_t pitch = row_bytes<T>(a.inputs);
    const uint8_t* of = (const uint8_t*)sums_of<T>((const uint8_t*)a.planes + m * pitch, a.inputs);
    const T* x = (const T*)a.x + m * a.pitch;
    const int32_t zero = a.zero;
    F at(w, a.super);
    for (int64_t n = 0; n < a.inputs; n += RUN, x += RUN, of += sizeof(Sums), at.next()) {
        at.ask();
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++)
            for (int h = 0; h < G; h++) {
                Vec part[R] = {};
#pragma GCC unroll 8
                for (int i = h * 4; i < (G == 2 ? h * 4 + 4 : 8); i++) {
                    const Ints codes = at.four(i, v);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
                        Vec code = __builtin_convertvector((codes >> 8 * j & 255) - zero, Vec);
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++) part[r] += code * widen(x[r * a.pitch + i * 4 + j]);
                    }
                }
                const int group = F::GROUPS == 2 ? h : 0;
                const Vec scale = at.scale(group, v), minimum = at.minimum(group, v);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    total[r][v] += part[r] * scale;
                    if (F::MINIMA) total[r][v] -= minimum * ((const Sums*)(of + r * pitch))->sums[h];
                }
            }
    }
}

template <int R, typename F, typename T>
INLINE void tile(const Linear& a, int64_t m, const uint8_t* w, Vec (&total)[R][WIDE]) {
#if defined(DOT_FOURS)
    whole_tile<R, F, T>(a, m, w, total);
#elif defined(DOT_PAIRS)
    if constexpr (PLANES<T> == 2 || R <= 2)
        whole_tile<R, F, T>(a, m, w, total);
    else
        float_tile<R, F, T>(a, m, w, total);
#else
    float_tile<R, F, T>(a, m, w, total);
#endif
}

#if defined(TILES)
// From how many rows on tiles are faster: they load and store as much for one as for many. On a Xeon with AMX, 16
// threads (2026-11-25), an expert's 4 rows took as long in q4_k by either way and 1.4 times as long by tiles in q6_k;
// 16 rows 1.3 times as long without tiles in q4_k, and equally long in q6_k.
constexpr int64_t TILED_ROWS = 8;
constexpr int CODES_TILE = 7, ROWS_TILE = 3;  // 0 to 2: sums of an int8 plane; from ROWS_TILE on: rows of an int8 plane

// The dot products of int8 plane D and the ones below it.
template <int D> INLINE void dot_planes(const uint8_t* x, int64_t inputs, int64_t pitch, int32_t (*to)[16][BLOCK]) {
    tile_zero<D>();
    tile_load<ROWS_TILE + D>(x + D * inputs, pitch);
    tile_dot_su<D, ROWS_TILE + D, CODES_TILE>();
    tile_store<D>(to[D], 4 * BLOCK);
    if constexpr (D > 0) dot_planes<D - 1>(x, inputs, pitch, to);
}

// A block of outputs for rows m..m + count - 1, sixteen at most.
template <typename F, typename T> void tiled(const Linear& a, int64_t m, int count, int64_t o, const uint8_t* w) {
    constexpr int D = PLANES<T>, LENGTH = RUN / F::GROUPS;
    const int64_t pitch = row_bytes<T>(a.inputs), runs = a.inputs / RUN;
    const uint8_t *x = (const uint8_t*)a.planes + m * pitch, *of = (const uint8_t*)sums_of<T>(x, a.inputs);
    TileShapes shapes;
    for (int d = 0; d < D; d++) shapes.set(d, count, 4 * BLOCK), shapes.set(ROWS_TILE + d, count, LENGTH);
    shapes.set(CODES_TILE, LENGTH / 4, 4 * BLOCK);
    tiles_begin(shapes);
    Vec total[16] = {};
    alignas(64) int32_t made[2][D][16][BLOCK];  // in turn: a load that waits for one store does not wait for the next
    alignas(64) Ints codes[2][RUN / 4];
    F at(w, a.super);
    for (int64_t g = 0; g < runs; g++, x += RUN, of += sizeof(Sums), at.next()) {
        at.ask();
        Ints* four = codes[g % 2];
#pragma GCC unroll 8
        for (int i = 0; i < RUN / 4; i++) four[i] = at.four(i, 0);
        for (int h = 0; h < F::GROUPS; h++) {
            auto sums = made[(g * F::GROUPS + h) % 2];
            tile_load<CODES_TILE>(four + h * LENGTH / 4, 4 * BLOCK);
            dot_planes<D - 1>(x + h * LENGTH, a.inputs, pitch, sums);
            const Vec scale = at.scale(h, 0), minimum = at.minimum(h, 0);
            for (int r = 0; r < count; r++) {
                const Sums& one = *(const Sums*)(of + r * pitch);
                Ints low = (*(const Ints*)sums[1][r] << 8) + *(const Ints*)sums[0][r];
                Ints high = *(const Ints*)sums[D - 1][r];
                low -= too_much<F>(one.low, a.zero, h);
                if (D == 3) high -= too_much<F>(one.high, a.zero, h);
                accumulate<F, T>(total[r], low, high, scale, minimum, one, h);
            }
        }
    }
    for (int r = 0; r < count; r++) {
        const Vec one[1][WIDE] = {{total[r]}};
        store_sums<T>(a, m + r, o, one);
    }
}
#endif

// y[m : m + R, o : o + BLOCK], as far as there are outputs.
template <int R, typename F, typename T> void outputs(const Linear& a, int64_t m, int64_t o, const uint8_t* w) {
    Vec total[R][WIDE] = {};
    tile<R, F, T>(a, m, w, total);
    store_sums<T>(a, m, o, total);
}

// Block i of outputs for rows m and on; w: its weights.
template <typename F, typename T> INLINE void rows(const Linear& a, int64_t m, int64_t i, const uint8_t* w) {
#if defined(TILES)
    for (; a.rows - m >= TILED_ROWS; m += 16) tiled<F, T>(a, m, a.rows - m < 16 ? a.rows - m : 16, i * BLOCK, w);
#endif
    for (; m + ROWS <= a.rows; m += ROWS) outputs<ROWS, F, T>(a, m, i * BLOCK, w);
    switch (a.rows - m) {
        case 3:
            if constexpr (ROWS > 3) return outputs<3, F, T>(a, m, i * BLOCK, w);
            break;
        case 2:
            if constexpr (ROWS > 2) return outputs<2, F, T>(a, m, i * BLOCK, w);
            break;
        case 1: return outputs<1, F, T>(a, m, i * BLOCK, w);
    }
}

INLINE void done() {
#if defined(TILES)
    tiles_end();
#endif
}

template <typename F, typename T> void linear(const Linear& a, int part, int parts) {
    const int64_t size = F::bytes(a.inputs, a.super);
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    for (int64_t i = share.first; i < share.last; i++) rows<F, T>(a, 0, i, (const uint8_t*)a.blocks + i * size);
    done();
}

template <typename F, typename T> void experts(const Experts& a, int part, int parts) {
    const int64_t size = F::bytes(a.inputs, a.super), blocks = (a.outputs + BLOCK - 1) / BLOCK;
    each_block((const int32_t*)a.offsets, a.experts, blocks, a.taken, part, parts, [&](int64_t e, int64_t i, int64_t m, int64_t last) {
        const T* bias = a.bias ? (const T*)a.bias + e * a.outputs : nullptr;
        const int64_t first = weight_of(a.at, e) * blocks;
        const Linear of = {a.x, a.planes, nullptr, bias, a.y, last, a.inputs, a.outputs, a.pitch, a.super, a.zero};
        rows<F, T>(of, m, i, (const uint8_t*)a.blocks + (first + i) * size);
    });
    done();
}

// 32 inputs of a block's outputs, before they are multiplied out.
template <typename F> struct Spread {
    alignas(64) uint8_t codes[RUN / 4][BLOCK][4];
    float scales[2][BLOCK], minima[2][BLOCK];

    INLINE Spread(const F& at) {
        for (int v = 0; v < WIDE; v++) {
            for (int i = 0; i < RUN / 4; i++) *(IntsAnywhere*)codes[i][v * LANES] = at.four(i, v);
            for (int h = 0; h < 2; h++) {
                const int group = F::GROUPS == 2 ? h : 0;
                store(scales[h] + v * LANES, at.scale(group, v));
                store(minima[h] + v * LANES, at.minimum(group, v));
            }
        }
    }

    template <typename T> INLINE void write(int64_t o, int zero, float by, T* y) const {
        float values[RUN];
        for (int i = 0; i < RUN; i++) {
            const int h = i / (RUN / 2);
            values[i] = (float)(codes[i / 4][o][i % 4] - zero) * scales[h][o];
            if (F::MINIMA) values[i] -= minima[h][o];
        }
        for (int i = 0; i < RUN; i += LANES) store(y + i, load(values + i) * by);
    }
};

template <typename F, typename T> void dequantize(const Dequantize& a, int part, int parts) {
    const int64_t size = F::bytes(a.inputs, a.super);
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    for (int64_t b = share.first; b < share.last; b++) {
        F at((const uint8_t*)a.blocks + b * size, a.super);
        const int64_t count = a.outputs - b * BLOCK < BLOCK ? a.outputs - b * BLOCK : BLOCK;
        for (int64_t n = 0; n < a.inputs; n += RUN, at.next()) {
            const Spread<F> run(at);
            for (int64_t o = 0; o < count; o++) run.write(o, (int)a.zero, 1, (T*)a.y + (b * BLOCK + o) * a.inputs + n);
        }
    }
}

// Threads share the groups of all rows: a step of one token has one row.
template <typename F, typename T> void take_rows(const TakeRows& a, int part, int parts) {
    const int64_t groups = a.inputs / a.super, size = F::bytes(a.inputs, a.super), group = size / groups;
    Share share(a.count * groups, part, parts);
    for (int64_t i = share.first; i < share.last; i++) {
        const int64_t row = a.ids[i / groups] - a.start, g = i % groups;
        T* y = (T*)a.y + i * a.super;
        if (row < 0 || row >= a.outputs) {
            memset(y, 0, a.super * sizeof(T));
            continue;
        }
        F at((const uint8_t*)a.blocks + row / BLOCK * size + g * group, a.super);
        for (int64_t n = 0; n < a.super; n += RUN, at.next()) Spread<F>(at).write(row % BLOCK, (int)a.zero, (float)a.by, y + n);
    }
}

#define FORM_OPS_OF(name, Form, T, suffix)                             \
    OP(name##_linear_##suffix, (linear<Form, T>), Linear)              \
    OP(name##_experts_##suffix, (experts<Form, T>), Experts)           \
    OP(name##_dequantize_##suffix, (dequantize<Form, T>), Dequantize)  \
    OP(name##_rows_##suffix, (take_rows<Form, T>), TakeRows)
#define FORM_OPS(name, Form)            \
    FORM_OPS_OF(name, Form, float, f32) \
    FORM_OPS_OF(name, Form, bf16, bf16)
