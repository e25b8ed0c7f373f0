// y [M, O] = x [M, I] times the transpose of a weight [O, I] in super-blocks, plus a bias [O], for a few rows; sums are
// f32. A weight is (code - zero) * scale - minimum; scale and minimum of a group of 16 or 32 inputs are bytes times two
// f16 factors of their super-block.
//
// The weight lies in blocks of 16 outputs, whose super-blocks follow each other: a thread reads one stream of memory. A
// super-block is 16 factors of scales, 16 of minima, and then of each 32 inputs 16 scales and 16 minima (twice where
// groups have 16 inputs) and the codes, four inputs of each output side by side. Codes of 4 bits have those of the
// second 16 inputs above those of the first. As in q8_0_cpu.cpp VNNI multiplies such fours with x in three digits.

#include "op.h"
#include "simd.h"
#include "store_sums.h"
#include "experts.h"

struct Linear {
    const void *x, *digits, *blocks, *bias;  // bias: null where there is none
    void* y;
    int64_t rows, inputs, outputs, pitch;  // pitch: elements from row to row of x
    int64_t super, zero;                   // inputs of a super-block; what all codes have too much
};

// The weights of several experts, one after the other, each with rows of x of its own.
struct Experts {
    const void *x, *digits, *blocks, *bias, *ends, *at;  // bias [experts, outputs]; ends: as each_block has it; at: weight_of
    void* y;
    int64_t experts, inputs, outputs, pitch, super, zero;
};

struct Split {
    const void* x;
    void* digits;  // Digits [rows, runs]
    int64_t rows, inputs, pitch;
};

struct Dequantize {
    const void* blocks;
    void* y;
    int64_t inputs, outputs, super, zero;
};

constexpr int BLOCK = 16;                 // outputs
constexpr int RUN = 32;                   // inputs that lie together
constexpr int AHEAD = 4096;               // bytes from what is read to what is asked for
constexpr int WIDE = BLOCK / LANES;       // vectors of a block's outputs
constexpr int ROWS = LANES == 4 ? 2 : 4;  // rows at once: their sums and what is added to them, in registers
constexpr int FACTORS = 4 * BLOCK;        // bytes of a super-block's

constexpr int code_bytes(int bits) { return BLOCK * RUN * bits / 8; }
constexpr int run_bytes(int bits, int groups) { return groups * 2 * BLOCK + code_bytes(bits); }  // groups: of a run

// A run of a row of x: numbers sum_d digits[d] 256^d, times scale; and sums of its two halves.
struct Digits {
    int8_t digits[3][RUN];
    int32_t whole[3][2];  // of each digit
    float sums[2], scale;
};

// 16 bits as f16, numbers v * LANES.. of sixteen.
INLINE Vec factors(const uint8_t* p, int v) {
    Ints bits = __builtin_convertvector(*(const ShortsAnywhere*)(p + 2 * v * LANES), Ints);
    Vec size = (Vec)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Vec)((Ints)size | (bits & 0x8000) << 16);
}

INLINE Vec bytes(const uint8_t* p, int v) { return load((const int8_t*)p + v * LANES); }

template <typename T> void split(const Split& a, int part, int parts) {
    const int64_t runs = a.inputs / RUN;
    Share share(a.rows * runs, part, parts);
    for (int64_t n = share.first; n < share.last; n++) {
        const T* x = (const T*)a.x + n / runs * a.pitch + n % runs * RUN;
        Digits& to = ((Digits*)a.digits)[n];
#if defined(__AVX512VNNI__)
        Vec values[2] = {load(x), load(x + LANES)};
        float most = largest(max(values[0] < 0 ? -values[0] : values[0], values[1] < 0 ? -values[1] : values[1]));
        int32_t bits;
        memcpy(&bits, &most, 4);
        int32_t exponent = bits >> 23 < 30 ? 30 : bits >> 23;  // numbers below 2^22 then, of runs that are not tiny
        int32_t up = (275 - exponent) << 23, down = (exponent - 21) << 23;
        float factor;
        memcpy(&factor, &up, 4);
        memcpy(&to.scale, &down, 4);
        bool finite = sum(values[0] * 0 + values[1] * 0) == 0;
        if (!finite) to.scale = __builtin_nanf("");
        for (int j = 0; j < 2; j++) {
            Ints left = (Ints)_mm512_cvtps_epi32((__m512)(values[j] * factor));
            for (int d = 0; d < 3; d++) {
                Ints digit = left << 24 >> 24;
                store(to.digits[d] + j * LANES, digit);
                to.whole[d][j] = _mm512_reduce_add_epi32((__m512i)digit);
                left = (left - digit) >> 8;
            }
            to.sums[j] = ((float)to.whole[2][j] * 65536 + (float)(to.whole[1][j] * 256 + to.whole[0][j])) * to.scale;
        }
#else
        for (int j = 0; j < 2; j++) {
            to.sums[j] = 0;
            for (int i = 0; i < RUN / 2; i++) to.sums[j] += widen(x[j * (RUN / 2) + i]);
        }
#endif
    }
}

// What a group's codes and its sum of x are multiplied by.
struct Numbers {
    Vec scale, minimum;
};
template <int G> INLINE Numbers numbers(const uint8_t* super, const uint8_t* run, int half, int v) {
    const uint8_t* at = run + (G == 2 ? half * 2 * BLOCK : 0);
    return {factors(super, v) * bytes(at, v), factors(super + 2 * BLOCK, v) * bytes(at + BLOCK, v)};
}

// A block of outputs for rows m..m + R - 1. BITS of a code; G groups in a run.
#if defined(__AVX512VNNI__)
template <int BITS> INLINE __m512i four(const uint8_t* codes, int i) {
    if (BITS == 8) return _mm512_loadu_si512(codes + i * 64);
    __m512i both = _mm512_loadu_si512(codes + i % 4 * 64);
    return _mm512_and_si512(i < 4 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}

template <int R, int BITS, int G, typename T>
INLINE void tile(const Linear& a, int64_t m, const uint8_t* w, Vec (&total)[R][WIDE]) {
    const int64_t runs = a.inputs / RUN, each = a.super / RUN;
    const Digits* x = (const Digits*)a.digits + m * runs;
    const int32_t zero = a.zero;
    for (int64_t s = 0; s < runs; s += each) {
        const uint8_t* super = w;
        w += FACTORS;
        for (int64_t g = 0; g < each; g++, w += run_bytes(BITS, G), x++) {
            for (int i = 0; i < run_bytes(BITS, G); i += 64) __builtin_prefetch(w + AHEAD + i, 0, 2);
            const uint8_t* codes = w + G * 2 * BLOCK;
#pragma GCC unroll 2
            for (int h = 0; h < G; h++) {
                __m512i part[R][3];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 3
                    for (int d = 0; d < 3; d++) {
                        const int32_t* whole = x[r * runs].whole[d];
                        part[r][d] = _mm512_set1_epi32(-zero * (G == 2 ? whole[h] : whole[0] + whole[1]));
                    }
#pragma GCC unroll 8
                for (int i = h * 4; i < (G == 2 ? h * 4 + 4 : 8); i++) {
                    __m512i found = four<BITS>(codes, i);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
                        for (int d = 0; d < 3; d++) {
                            int32_t four;
                            memcpy(&four, x[r * runs].digits[d] + 4 * i, 4);
                            part[r][d] = _mm512_dpbusd_epi32(part[r][d], found, _mm512_set1_epi32(four));
                        }
                }
                Numbers by = numbers<G>(super, w, h, 0);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const Digits& of = x[r * runs];
                    Vec low = (Vec)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(part[r][1], 8), part[r][0]));
                    Vec sums = (Vec)_mm512_cvtepi32_ps(part[r][2]) * 65536 + low;
                    total[r][0] += sums * (by.scale * of.scale);
                    total[r][0] -= by.minimum * (G == 2 ? of.sums[h] : of.sums[0] + of.sums[1]);
                }
            }
        }
    }
}
#else
template <int R, int BITS, int G, typename T>
INLINE void tile(const Linear& a, int64_t m, const uint8_t* w, Vec (&total)[R][WIDE]) {
    const int64_t runs = a.inputs / RUN, each = a.super / RUN;
    const Digits* digits = (const Digits*)a.digits + m * runs;
    const T* x = (const T*)a.x + m * a.pitch;
    const int32_t zero = a.zero;
    for (int64_t s = 0; s < runs; s += each) {
        const uint8_t* super = w;
        w += FACTORS;
        for (int64_t g = 0; g < each; g++, w += run_bytes(BITS, G), x += RUN, digits++) {
            for (int i = 0; i < run_bytes(BITS, G); i += 64) __builtin_prefetch(w + AHEAD + i, 0, 2);
            const uint8_t* codes = w + G * 2 * BLOCK;
            for (int v = 0; v < WIDE; v++)
                for (int h = 0; h < 2; h++) {
                    Vec part[R] = {};
                    for (int i = 0; i < 4; i++) {
                        const uint8_t* at = codes + (BITS == 8 ? h * 256 : 0) + i * 64 + 4 * v * LANES;
                        Ints fours = *(const IntsAnywhere*)at >> (BITS == 8 ? 0 : 4 * h);
#pragma GCC unroll 4
                        for (int j = 0; j < 4; j++) {
                            Vec code = __builtin_convertvector((fours >> 8 * j & ((1 << BITS) - 1)) - zero, Vec);
#pragma GCC unroll 4
                            for (int r = 0; r < R; r++) part[r] += code * widen(x[r * a.pitch + h * 16 + i * 4 + j]);
                        }
                    }
                    Numbers by = numbers<G>(super, w, h, v);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++)
                        total[r][v] += part[r] * by.scale - by.minimum * digits[r * runs].sums[h];
                }
        }
    }
}
#endif

// y[m : m + R, o : o + BLOCK], as far as there are outputs.
template <int R, int BITS, int G, typename T> void outputs(const Linear& a, int64_t m, int64_t o, const uint8_t* w) {
    Vec total[R][WIDE] = {};
    tile<R, BITS, G, T>(a, m, w, total);
    store_sums<T>(a, m, o, total);
}

INLINE int64_t block_bytes(int64_t inputs, int64_t super, int bits, int groups) {
    return inputs / super * (FACTORS + super / RUN * run_bytes(bits, groups));
}

// Block i of outputs for rows m and on; w: its weights.
template <int BITS, int G, typename T> INLINE void rows(const Linear& a, int64_t m, int64_t i, const uint8_t* w) {
    for (; m + ROWS <= a.rows; m += ROWS) outputs<ROWS, BITS, G, T>(a, m, i * BLOCK, w);
    for (; m < a.rows; m++) outputs<1, BITS, G, T>(a, m, i * BLOCK, w);
}

template <int BITS, int G, typename T> void linear(const Linear& a, int part, int parts) {
    const int64_t size = block_bytes(a.inputs, a.super, BITS, G);
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    for (int64_t i = share.first; i < share.last; i++)
        rows<BITS, G, T>(a, 0, i, (const uint8_t*)a.blocks + i * size);
}

template <int BITS, int G, typename T> void experts(const Experts& a, int part, int parts) {
    const int64_t size = block_bytes(a.inputs, a.super, BITS, G), blocks = (a.outputs + BLOCK - 1) / BLOCK;
    each_block((const int32_t*)a.ends, a.experts, blocks, part, parts, [&](int64_t e, int64_t i, int64_t m, int64_t last) {
        const T* bias = a.bias ? (const T*)a.bias + e * a.outputs : nullptr;
        const int64_t first = weight_of(a.at, e) * blocks;
        const Linear of = {a.x, a.digits, nullptr, bias, a.y, last, a.inputs, a.outputs, a.pitch, a.super, a.zero};
        rows<BITS, G, T>(of, m, i, (const uint8_t*)a.blocks + (first + i) * size);
    });
}

template <int BITS, int G, typename T> void dequantize(const Dequantize& a, int part, int parts) {
    const int64_t size = block_bytes(a.inputs, a.super, BITS, G);
    Share share(a.outputs, part, parts);
    for (int64_t o = share.first; o < share.last; o++) {
        const uint8_t *w = (const uint8_t*)a.blocks + o / BLOCK * size, *super = w;
        const int k = o % BLOCK, v = k / LANES, lane = k % LANES;
        for (int64_t n = 0; n < a.inputs; n += RUN, w += run_bytes(BITS, G)) {
            if (n % a.super == 0) super = w, w += FACTORS;
            for (int h = 0; h < 2; h++) {
                Numbers by = numbers<G>(super, w, h, v);
                float scale = by.scale[lane], minimum = by.minimum[lane], values[RUN / 2];
                for (int i = 0; i < RUN / 2; i++) {
                    const uint8_t* at = w + G * 2 * BLOCK + i / 4 * 64 + 4 * k + i % 4;
                    int code = BITS == 8 ? at[h * 256] : *at >> 4 * h & 15;
                    values[i] = (float)(code - (int)a.zero) * scale - minimum;
                }
                T* y = (T*)a.y + o * a.inputs + n + h * (RUN / 2);
                for (int i = 0; i < RUN / 2; i += LANES) store(y + i, load(values + i));
            }
        }
    }
}

#define OPS(bits, groups, T, suffix)                                                                                \
    OP(super_blocks_linear_##bits##_##groups##_##suffix, (linear<bits, groups, T>), Linear)                         \
    OP(super_blocks_experts_##bits##_##groups##_##suffix, (experts<bits, groups, T>), Experts)                       \
    OP(super_blocks_dequantize_##bits##_##groups##_##suffix, (dequantize<bits, groups, T>), Dequantize)
#define OPS_OF(T, suffix)   \
    OPS(4, 1, T, suffix)    \
    OPS(4, 2, T, suffix)    \
    OPS(8, 1, T, suffix)    \
    OPS(8, 2, T, suffix)    \
    OP(super_blocks_split_##suffix, split<T>, Split)

OPS_OF(float, f32)
OPS_OF(bf16, bf16)
