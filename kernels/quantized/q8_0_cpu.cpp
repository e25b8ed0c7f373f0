// y [M, O] = x [M, I] times the transpose of a weight [O, I] in Q8_0, plus a bias [O], for a few rows; sums are f32.
//
// The weight lies in blocks of 16 outputs, whose groups of 32 inputs follow each other: a thread reads one stream of
// memory. A group is 16 f16 scales and then the codes + 128, four inputs of each output side by side: VNNI multiplies and
// adds such fours of bytes, for 16 outputs at once. For it `split` writes x as whole numbers of 23 bits, by groups as
// the weight, in three signed digits of base 256. So x is as exact as in f32 beside its group's largest, and what is
// added of a group is exact. Without VNNI codes are converted to f32, which holds code * scale exactly.

#include "op.h"
#include "simd.h"
#include "store_sums.h"
#include "experts.h"

struct Linear {
    const void *x, *digits, *blocks, *bias;  // bias: null where there is none
    void* y;
    int64_t rows, inputs, outputs, pitch;  // pitch: elements from row to row of x
};

// The weights of several experts, one after the other, each with rows of x of its own.
struct Experts {
    const void *x, *digits, *blocks, *bias, *ends, *at;  // bias [experts, outputs]; ends: as each_block has it; at: weight_of
    void* y;
    int64_t experts, inputs, outputs, pitch;
};

struct Split {
    const void* x;
    void* digits;  // Digits [rows, groups]
    int64_t rows, inputs, pitch;
};

struct Dequantize {
    const void* blocks;
    void* y;
    int64_t inputs, outputs;
};

struct Encode {
    const void* weight;
    void *codes, *scales;  // scales: f32
    int64_t groups;
};

constexpr int BLOCK = 16;                   // outputs
constexpr int GROUP = 32;                   // inputs with one scale
constexpr int BYTES = BLOCK * (2 + GROUP);  // of a group of a block
constexpr int AHEAD = 4096;                 // bytes from what is read to what is asked for
constexpr int WIDE = BLOCK / LANES;         // vectors of a block's outputs
constexpr int ROWS = LANES == 4 ? 2 : 4;    // rows at once: their sums and what is added to them, in registers

// A group of a row of x: numbers sum_d digits[d] 256^d, times scale.
struct Digits {
    int8_t digits[3][GROUP];
    int32_t sums[3];  // of each digit, times -128, which the codes have too much
    float scale;
};

INLINE void ask(const uint8_t* p) {
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + AHEAD + i, 0, 2);
}

// Scales of outputs v * LANES.. of a block. They are not negative: f16's bits in f32's places lack 112 in the exponent.
INLINE Vec block_scales(const uint8_t* w, int v) {
    return (Vec)(__builtin_convertvector(*(const ShortsAnywhere*)(w + 2 * v * LANES), Ints) << 13) * 0x1p112f;
}

#if defined(__AVX512VNNI__)
template <typename T> void split(const Split& a, int part, int parts) {
    const int64_t groups = a.inputs / GROUP;
    Share share(a.rows * groups, part, parts);
    for (int64_t n = share.first; n < share.last; n++) {
        const T* x = (const T*)a.x + n / groups * a.pitch + n % groups * GROUP;
        Digits& to = ((Digits*)a.digits)[n];
        Vec values[2] = {load(x), load(x + LANES)};
        float most = largest(max(values[0] < 0 ? -values[0] : values[0], values[1] < 0 ? -values[1] : values[1]));
        int32_t bits;
        memcpy(&bits, &most, 4);
        int32_t exponent = bits >> 23 < 30 ? 30 : bits >> 23;  // numbers below 2^22 then, of groups that are not tiny
        int32_t up = (275 - exponent) << 23, down = (exponent - 21) << 23;
        float factor;
        memcpy(&factor, &up, 4);
        memcpy(&to.scale, &down, 4);
        bool finite = sum(values[0] * 0 + values[1] * 0) == 0;
        if (!finite) to.scale = __builtin_nanf("");
        __m512i total[3] = {};
        for (int j = 0; j < 2; j++) {
            Ints left = (Ints)_mm512_cvtps_epi32((__m512)(values[j] * factor));
            for (int d = 0; d < 3; d++) {
                Ints digit = left << 24 >> 24;
                store(to.digits[d] + j * LANES, digit);
                total[d] = _mm512_add_epi32(total[d], (__m512i)digit);
                left = (left - digit) >> 8;
            }
        }
        for (int d = 0; d < 3; d++) to.sums[d] = -128 * _mm512_reduce_add_epi32(total[d]);
    }
}

// A block of outputs for rows m..m + R - 1.
template <int R, typename T> INLINE void tile(const Linear& a, int64_t m, const uint8_t* w, Vec (&total)[R][WIDE]) {
    const int64_t groups = a.inputs / GROUP;
    const Digits* x = (const Digits*)a.digits + m * groups;
    for (int64_t g = 0; g < groups; g++, w += BYTES, x++) {
        ask(w);
        __m512i part[R][3];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 3
            for (int d = 0; d < 3; d++) part[r][d] = _mm512_set1_epi32(x[r * groups].sums[d]);
#pragma GCC unroll 8
        for (int i = 0; i < GROUP; i += 4) {
            __m512i codes = _mm512_loadu_si512(w + 2 * BLOCK + i * BLOCK);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 3
                for (int d = 0; d < 3; d++) {
                    int32_t four;
                    memcpy(&four, x[r * groups].digits[d] + i, 4);
                    part[r][d] = _mm512_dpbusd_epi32(part[r][d], codes, _mm512_set1_epi32(four));
                }
        }
        Vec scale = block_scales(w, 0);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            Vec low = (Vec)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(part[r][1], 8), part[r][0]));
            Vec sums = (Vec)_mm512_cvtepi32_ps(part[r][2]) * 65536 + low;
            total[r][0] += sums * (scale * x[r * groups].scale);
        }
    }
}
#else
template <typename T> void split(const Split&, int, int) {}

template <int R, typename T> INLINE void tile(const Linear& a, int64_t m, const uint8_t* w, Vec (&total)[R][WIDE]) {
    const T* x = (const T*)a.x + m * a.pitch;
    for (int64_t i = 0; i < a.inputs; i += GROUP, w += BYTES) {
        ask(w);
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            Vec part[R] = {};
            for (int q = 0; q < GROUP; q += 4) {
                Ints codes = *(const IntsAnywhere*)(w + 2 * BLOCK + q * BLOCK + 4 * v * LANES) ^ (int32_t)0x80808080;
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    Vec code = __builtin_convertvector(codes << (24 - 8 * j) >> 24, Vec);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) part[r] += code * widen(x[r * a.pitch + i + q + j]);
                }
            }
            Vec scale = block_scales(w, v);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) total[r][v] += part[r] * scale;
        }
    }
}
#endif

// y[m : m + R, o : o + BLOCK], as far as there are outputs.
template <int R, typename T> void outputs(const Linear& a, int64_t m, int64_t o, const uint8_t* w) {
    Vec total[R][WIDE] = {};
    tile<R, T>(a, m, w, total);
    store_sums<T>(a, m, o, total);
}

// Block i of outputs for rows m and on; w: its weights.
template <typename T> INLINE void rows(const Linear& a, int64_t m, int64_t i, const uint8_t* w) {
    for (; m + ROWS <= a.rows; m += ROWS) outputs<ROWS, T>(a, m, i * BLOCK, w);
    switch (a.rows - m) {
#if defined(__AVX2__)
        case 3: outputs<3, T>(a, m, i * BLOCK, w); break;
        case 2: outputs<2, T>(a, m, i * BLOCK, w); break;
#endif
        case 1: outputs<1, T>(a, m, i * BLOCK, w);
    }
}

template <typename T> void linear(const Linear& a, int part, int parts) {
    const int64_t size = a.inputs / GROUP * BYTES;
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    for (int64_t i = share.first; i < share.last; i++) rows<T>(a, 0, i, (const uint8_t*)a.blocks + i * size);
}

template <typename T> void experts(const Experts& a, int part, int parts) {
    const int64_t size = a.inputs / GROUP * BYTES, blocks = (a.outputs + BLOCK - 1) / BLOCK;
    each_block((const int32_t*)a.ends, a.experts, blocks, part, parts, [&](int64_t e, int64_t i, int64_t m, int64_t last) {
        const T* bias = a.bias ? (const T*)a.bias + e * a.outputs : nullptr;
        const int64_t first = weight_of(a.at, e) * blocks;
        const Linear of = {a.x, a.digits, nullptr, bias, a.y, last, a.inputs, a.outputs, a.pitch};
        rows<T>(of, m, i, (const uint8_t*)a.blocks + (first + i) * size);
    });
}

template <typename T> void dequantize(const Dequantize& a, int part, int parts) {
    const int64_t groups = a.inputs / GROUP;
    Share share(a.outputs, part, parts);
    for (int64_t o = share.first; o < share.last; o++) {
        const uint8_t* w = (const uint8_t*)a.blocks + o / BLOCK * groups * BYTES;
        const int k = o % BLOCK;
        for (int64_t g = 0; g < groups; g++, w += BYTES) {
            float scale = block_scales(w, k / LANES)[k % LANES];
            alignas(64) int8_t codes[GROUP];
            for (int i = 0; i < GROUP; i += 4) memcpy(codes + i, w + 2 * BLOCK + i * BLOCK + 4 * k, 4);
            for (int i = 0; i < GROUP; i++) codes[i] ^= -128;
            T* y = (T*)a.y + o * a.inputs + g * GROUP;
            for (int i = 0; i < GROUP; i += LANES) store(y + i, load(codes + i) * scale);
        }
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
OP(q8_0_split_f32, split<float>, Split)
OP(q8_0_split_bf16, split<bf16>, Split)
OP(q8_0_linear_f32, linear<float>, Linear)
OP(q8_0_linear_bf16, linear<bf16>, Linear)
OP(q8_0_experts_f32, experts<float>, Experts)
OP(q8_0_experts_bf16, experts<bf16>, Experts)
OP(q8_0_dequantize_f32, dequantize<float>, Dequantize)
OP(q8_0_dequantize_bf16, dequantize<bf16>, Dequantize)
