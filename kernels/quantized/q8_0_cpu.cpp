// y [M, O] = x [M, I] times the transpose of a weight [O, I] in Q8_0, plus a bias [O], for a few rows; sums are f32.
//
// A weight is code * scale, which f32 holds exactly: 8 bits times 11. Few rows multiply codes as they are read. Of more
// rows a thread first dequantises a block of outputs to its scratch, which the caches hold, so that it is done once.
// As in cpu_gemm.cpp, the tile asks for the weights that come next, and threads share the outputs.

#include "op.h"
#include "simd.h"

struct Linear {
    const void *x, *codes, *scales, *bias;  // bias: null where there is none
    void *y, *scratch;                      // scratch: BLOCK * (inputs + inputs / GROUP) floats of each thread
    int64_t rows, inputs, outputs, pitch;   // pitch: elements from row to row of x
};

struct Dequantize {
    const void *codes, *scales;
    void* y;
    int64_t groups;
};

struct Encode {
    const void* weight;
    void *codes, *scales;  // scales: f32
    int64_t groups;
};

constexpr int BLOCK = 8;   // outputs that a thread computes for all rows before it goes on
constexpr int GROUP = 32;  // weights with one scale
#if defined(__AVX512F__)
constexpr int ROWS = 4;
#else
constexpr int ROWS = 2;
#endif


// f16 numbers that are not negative: their bits in f32's places lack 112 in the exponent.
INLINE float widen_half(uint16_t half) {
    uint32_t bits = (uint32_t)half << 13;
    float y;
    memcpy(&y, &bits, 4);
    return y * 0x1p112f;
}
INLINE void widen_halves(const uint16_t* p, int64_t count, float* y) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(y + i, (Vec)(__builtin_convertvector(*(const ShortsAnywhere*)(p + i), Ints) << 13) * 0x1p112f);
    for (; i < count; i++) y[i] = widen_half(p[i]);
}

// Weights of a tile: codes [outputs, inputs] with scales [outputs, groups] in f32.
struct Coded {
    const int8_t* codes;
    const float* scales;
    int64_t inputs;
    const int8_t* ahead;  // what to ask for meanwhile; null: nothing

    Coded from(int o) const {
        return {codes + o * inputs, scales + o * (inputs / GROUP), inputs, ahead ? ahead + o * inputs : nullptr};
    }
    INLINE void ask(int o, int64_t i) const {
        if (ahead) __builtin_prefetch(ahead + o * inputs + i, 0, 2);
    }
    INLINE float scale(int o, int64_t i) const { return scales[o * (inputs / GROUP) + i / GROUP]; }
    INLINE Vec weight(int o, int64_t i) const { return load(codes + o * inputs + i); }
};
// Weights that are dequantised.
struct Plain {
    const float* weights;
    int64_t inputs;

    Plain from(int o) const { return {weights + o * inputs, inputs}; }
    INLINE void ask(int, int64_t) const {}
    INLINE float scale(int, int64_t) const { return 1; }
    INLINE Vec weight(int o, int64_t i) const { return load(weights + o * inputs + i); }
};

// y[m : m + R, o : o + OUTS]; w begins at output o.
template <int R, int OUTS, typename T, typename W> INLINE void tile(const Linear& a, int64_t m, int64_t o, W w) {
    const T* x = (const T*)a.x + m * a.pitch;
    Vec total[R][OUTS] = {};
    for (int64_t i = 0; i < a.inputs; i += GROUP) {
        if (i % 64 == 0)
#pragma GCC unroll 8
            for (int k = 0; k < OUTS; k++) w.ask(k, i);
        if (R == 1 && sizeof(W) != sizeof(Plain)) {  // the scale on each group's sum: fewer multiplications
            Vec values[GROUP / LANES];
            for (int j = 0; j < GROUP / LANES; j++) values[j] = load(x + i + j * LANES);
#pragma GCC unroll 8
            for (int k = 0; k < OUTS; k++) {
                Vec part = w.weight(k, i) * values[0];
                for (int j = 1; j < GROUP / LANES; j++) part = w.weight(k, i + j * LANES) * values[j] + part;
                total[0][k] += part * w.scale(k, i);
            }
            continue;
        }
#pragma GCC unroll 8
        for (int j = 0; j < GROUP; j += LANES) {
            Vec values[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) values[r] = load(x + r * a.pitch + i + j);
#pragma GCC unroll 8
            for (int k = 0; k < OUTS; k++) {
                Vec weight = w.weight(k, i + j);
                if (sizeof(W) != sizeof(Plain)) weight *= w.scale(k, i);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) total[r][k] += values[r] * weight;
            }
        }
    }
    for (int r = 0; r < R; r++) {
        float out[OUTS];
        if (OUTS % 4) out[0] = sum(total[r][0]);
        for (int k = 0; k + 4 <= OUTS; k += 4) sums(total[r] + k, out + k);
        for (int k = 0; k < OUTS; k++) {
            float bias = a.bias ? widen(((const T*)a.bias)[o + k]) : 0;
            ((T*)a.y)[(m + r) * a.outputs + o + k] = narrow<T>(out[k] + bias);
        }
    }
}

// BLOCK outputs of rows m to the end, which are fewer than ROWS, or ROWS where that is 4.
template <typename T, typename W> void last_rows(const Linear& a, int64_t m, int64_t o, W w) {
    switch (a.rows - m) {
#if defined(__AVX512F__)
        case 3: return tile<3, BLOCK, T>(a, m, o, w);
        case 2: return tile<2, BLOCK, T>(a, m, o, w);
#endif
        case 1: return tile<1, BLOCK, T>(a, m, o, w);
    }
}
template <typename T, typename W> void all_rows(const Linear& a, int64_t o, W w) {
    int64_t m = 0;
    for (; m + ROWS <= a.rows; m += ROWS) {
        tile<ROWS, 4, T>(a, m, o, w);
        tile<ROWS, 4, T>(a, m, o + 4, w.from(4));
    }
    last_rows<T>(a, m, o, w);
}

INLINE void dequantize(const Coded& w, int count, float* y) {
    for (int k = 0; k < count; k++)
        for (int64_t i = 0; i < w.inputs; i += GROUP) {
            if (i % 64 == 0) w.ask(k, i);
            for (int j = 0; j < GROUP; j += LANES) store(y + k * w.inputs + i + j, w.weight(k, i + j) * w.scale(k, i));
        }
}

template <typename T> void linear(const Linear& a, int part, int parts) {
    const int64_t groups = a.inputs / GROUP, blocks = a.outputs / BLOCK;
    float* weights = (float*)a.scratch + part * BLOCK * (a.inputs + groups);
    float* scales = weights + BLOCK * a.inputs;
    const int8_t* codes = (const int8_t*)a.codes;
    const uint16_t* halves = (const uint16_t*)a.scales;
    Share share(blocks, part, parts);
    for (int64_t i = share.first; i < share.last; i++) {
        int64_t o = i * BLOCK;
        const int8_t* next = i + 1 < share.last ? codes + (o + BLOCK) * a.inputs : nullptr;
        widen_halves(halves + o * groups, BLOCK * groups, scales);
        Coded w = {codes + o * a.inputs, scales, a.inputs, next};
        if (a.rows > ROWS) {
            dequantize(w, BLOCK, weights);
            all_rows<T>(a, o, Plain{weights, a.inputs});
        } else {
            all_rows<T>(a, o, w);
        }
    }
    if (part < parts - 1) return;
    for (int64_t o = blocks * BLOCK; o < a.outputs; o++) {
        widen_halves(halves + o * groups, groups, scales);
        for (int64_t m = 0; m < a.rows; m++)
            tile<1, 1, T>(a, m, o, Coded{codes + o * a.inputs, scales, a.inputs, nullptr});
    }
}

template <typename T> void dequantize_all(const Dequantize& a, int part, int parts) {
    Share share(a.groups, part, parts);
    for (int64_t g = share.first; g < share.last; g++) {
        float scale = widen_half(((const uint16_t*)a.scales)[g]);
        for (int j = 0; j < GROUP; j += LANES)
            store((T*)a.y + g * GROUP + j, load((const int8_t*)a.codes + g * GROUP + j) * scale);
    }
}

// scale = max|w| / 127; codes are w * (1 / scale), rounded half away from zero.
template <typename T> void encode(const Encode& a, int part, int parts) {
    Share share(a.groups, part, parts);
    for (int64_t g = share.first; g < share.last; g++) {
        const T* w = (const T*)a.weight + g * GROUP;
        Vec most = {};
        for (int j = 0; j < GROUP; j += LANES) {
            Vec x = load(w + j);
            most = max(most, x < 0 ? -x : x);
        }
        float scale = largest(most) / 127, inverse = scale ? 1 / scale : 0;
        for (int j = 0; j < GROUP; j += LANES) {
            Vec x = load(w + j) * inverse, size = x < 0 ? -x : x;
            Ints whole = __builtin_convertvector(size, Ints);
            // Compared, not subtracted: a subtraction would be contracted with the product above.
            whole -= size >= __builtin_convertvector(whole, Vec) + 0.5f;
            store((int8_t*)a.codes + g * GROUP + j, x < 0 ? -whole : whole);
        }
        ((float*)a.scales)[g] = scale;
    }
}

OP(q8_0_encode_f32, encode<float>, Encode)
OP(q8_0_encode_bf16, encode<bf16>, Encode)
OP(q8_0_linear_f32, linear<float>, Linear)
OP(q8_0_linear_bf16, linear<bf16>, Linear)
OP(q8_0_dequantize_f32, dequantize_all<float>, Dequantize)
OP(q8_0_dequantize_bf16, dequantize_all<bf16>, Dequantize)
