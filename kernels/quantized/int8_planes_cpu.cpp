// x [rows, inputs] in int8 planes, as the operations of weights in blocks read it (int8_planes.h, blocks.h), also of
// experts' rows that an activation makes.

#include "op.h"
#include "simd.h"
#include "int8_planes.h"
#include "activations.h"
#include "experts.h"

struct Split {
    const void *x, *offsets;  // offsets: int32 [experts + 1], whose first and last say which rows; null: all
    void* y;               // [rows] of row_bytes
    int64_t rows, inputs, pitch, experts;
};

// The rows of experts, which become the inner ones on the way: x = f(gate) * up of both [rows, 2 * inputs], gate next
// to up.
struct SplitGated {
    const void *both, *offsets;
    void *x, *y;  // x [rows, inputs]
    int64_t inputs, experts, limit;  // of the activation, in 1 / LIMIT_UNITS
};

// Up to how many rows int8 planes are faster than a GEMM of the dequantised weight. Where VNNI adds up four products at
// once, any number; with AMX, whose GEMM of bf16 is fast as well, more rows of bf16 have not been measured.
constexpr int64_t FEW_ROWS = 64;
#if defined(DOT_FOURS)
EXPORT const int64_t max_rows_f32 = INT64_MAX, max_rows_bf16 = BF16_MATRICES ? FEW_ROWS : INT64_MAX;
#else
EXPORT const int64_t max_rows_f32 = FEW_ROWS, max_rows_bf16 = FEW_ROWS;
#endif

#if defined(DOT_FOURS) || defined(DOT_PAIRS)
// Run `run` of a row, whose inputs are x.
template <typename T> INLINE void split_run(const T* x, uint8_t* row, int64_t run, int64_t inputs, Sums& to) {
    constexpr int BITS = 8 * PLANES<T> - 2;  // numbers are below 2^BITS, of runs that are not tiny
    Vec values[RUN / LANES], most = {}, none = {};
    for (int v = 0; v < RUN / LANES; v++) {
        values[v] = load(x + v * LANES);
        most = max(values[v] < 0 ? -values[v] : values[v], most);
        none += values[v] * 0;
    }
    int32_t bits;
    const float one = largest(most);
    memcpy(&bits, &one, 4);
    int32_t exponent = bits >> 23 < 30 ? 30 : bits >> 23;
    int32_t up = (253 + BITS - exponent) << 23, down = (exponent + 1 - BITS) << 23;
    float factor;
    memcpy(&factor, &up, 4);
    memcpy(&to.scale, &down, 4);
    const bool finite = sum(none) == 0;
    if (!finite) to.scale = __builtin_nanf("");
    to = {{0, 0}, {0, 0}, {0, 0}, to.scale};
    for (int v = 0; v < RUN / LANES; v++) {
        const int half = v * LANES / (RUN / 2);
        Ints left = nearest(values[v] * factor);
#if defined(DOT_FOURS)
        int32_t whole[PLANES<T>];
        for (int d = 0; d < PLANES<T>; d++) {
            Ints plane = left << 24 >> 24;
            store((int8_t*)row + d * inputs + run * RUN + v * LANES, plane);
            whole[d] = sum(plane);
            left = (left - plane) >> 8;
        }
        to.low[half] += whole[1] * 256 + whole[0];
        if (PLANES<T> == 3) to.high[half] += whole[PLANES<T> - 1];
#else
        Ints low = left << 16 >> 16, high = (left - low) >> 16;
        store_pairs((int16_t*)row + run * RUN + v * LANES, low);
        to.low[half] += sum(low);
        if (PLANES<T> == 3) {
            store((int8_t*)row + 2 * inputs + run * RUN + v * LANES, high);
            to.high[half] += sum(high);
        }
#endif
    }
    for (int j = 0; j < 2; j++) to.sums[j] = ((float)to.high[j] * 65536 + (float)to.low[j]) * to.scale;
}
#endif

// A run of a row, x, where `row` begins in int8 planes.
template <typename T> INLINE void split_one(const T* x, uint8_t* row, int64_t run, int64_t inputs) {
    Sums& to = ((Sums*)sums_of<T>(row, inputs))[run];
#if defined(DOT_FOURS) || defined(DOT_PAIRS)
    split_run(x, row, run, inputs, to);
#else
    for (int j = 0; j < 2; j++) {
        to.sums[j] = 0;
        for (int i = 0; i < RUN / 2; i++) to.sums[j] += widen(x[j * (RUN / 2) + i]);
    }
#endif
}

template <typename T> void split(const Split& a, int part, int parts) {
    const int64_t runs = a.inputs / RUN;
    const Rows rows(a.offsets, a.experts, a.rows);
    Share share((rows.last - rows.first) * runs, part, parts);
    for (int64_t n = share.first; n < share.last; n++) {
        const int64_t i = rows.first + n / runs, run = n % runs;
        split_one((const T*)a.x + i * a.pitch + run * RUN, (uint8_t*)a.y + i * row_bytes<T>(a.inputs), run, a.inputs);
    }
}

template <typename F, typename T> void split_gated(const SplitGated& a, int part, int parts) {
    const int64_t runs = a.inputs / RUN;
    const float limit = (float)a.limit / LIMIT_UNITS;
    const Rows rows(a.offsets, a.experts, 0);
    Share share((rows.last - rows.first) * runs, part, parts);
    for (int64_t n = share.first; n < share.last; n++) {
        const int64_t i = rows.first + n / runs, run = n % runs;
        const T *gate = (const T*)a.both + i * 2 * a.inputs + run * RUN, *up = gate + a.inputs;
        T* x = (T*)a.x + i * a.inputs + run * RUN;
        for (int v = 0; v < RUN; v += LANES) store(x + v, F::of(load(gate + v), load(up + v), limit));
        split_one(x, (uint8_t*)a.y + i * row_bytes<T>(a.inputs), run, a.inputs);
    }
}

OP(split_f32, split<float>, Split)
OP(split_bf16, split<bf16>, Split)

#define SPLIT_GATED(name, F)                                          \
    OP(split_gated_##name##_f32, (split_gated<F, float>), SplitGated) \
    OP(split_gated_##name##_bf16, (split_gated<F, bf16>), SplitGated)

SPLIT_GATED(silu, Times<Silu>)
SPLIT_GATED(gelu, Times<Gelu>)
SPLIT_GATED(gelu_tanh, Times<GeluTanh>)
SPLIT_GATED(relu2, Times<Relu2>)
SPLIT_GATED(clamped_swiglu, ClampedSwiglu)
SPLIT_GATED(clamped_silu, ClampedSilu)
SPLIT_GATED(silu_clamped, SiluClamped)
