// Scales of groups of weights, and minima, with which little is lost when they are rounded: scale_search.py has the
// method. And whole super-blocks of the K types, as ggml_encoders.py makes them of these scales, bit for bit.
//
// Each lane of a vector has a group of its own in the search, so that nothing is added across lanes.

#include "op.h"
#include "simd.h"
#include "block_bits.h"

struct Search {
    const void* groups;     // f32 [count, size]; size is 16 or 32
    void *scales, *minima;  // f32 [count]; minima null: codes are -most to most - 1
    int64_t count, size, most, steps;
};

struct Encode {
    const void* weight;  // [supers, 256]
    void* blocks;        // as ggml's files hold them
    int64_t supers, steps;
};

// Elements of LANES groups, one after the other.
template <int SIZE> using Groups = float[SIZE][LANES];

// x, which is no larger than 2^21, to a whole number.
INLINE Vec rounded(Vec x) {
    const Vec shift = fill(12582912);  // 1.5 * 2^23
    return (x + shift) - shift;
}

struct Sums {
    Vec codes, squares, products;
};

// Sums over the codes of (x - less) * inverse, no lower than `low`, which is none where it cannot be lower anyway.
template <int SIZE, bool LOW> INLINE Sums sums_of(const Groups<SIZE>& x, Vec inverse, Vec less, Vec low, Vec high) {
    Sums y = {};
#pragma GCC unroll 4
    for (int i = 0; i < SIZE; i++) {
        Vec value = load(x[i]), code = (value - less) * inverse;
        code = code > high ? high : code;
        if (LOW) code = code < low ? low : code;
        code = rounded(code);
        y.codes += code, y.squares += code * code, y.products += code * value;
    }
    return y;
}

template <int SIZE> INLINE void with_minima(const Groups<SIZE>& x, float most, int steps, Vec& scale, Vec& minimum) {
    constexpr float N = SIZE;
    Vec low = {}, high = {}, total = {};
    for (int i = 0; i < SIZE; i++) {
        Vec value = load(x[i]);
        low = value < low ? value : low, high = value > high ? value : high, total += value;
    }
    const Vec span = high - low, inverse = span == 0 ? fill(0) : 1 / span;
    scale = span / most, minimum = -low;
    Vec best = fill(__builtin_inff());
    for (int step = 0; step < steps; step++) {
        Sums y = sums_of<SIZE, false>(x, (most - 1 + 2.0f * step / steps) * inverse, low, low, fill(most));
        const Vec spread = N * y.squares - y.codes * y.codes;
        Vec s = (N * y.products - y.codes * total) / spread, m = (s * y.codes - total) / N;
        const Vec alone = y.products / y.squares;
        s = m < 0 ? alone : s, m = m < 0 ? fill(0) : m;  // the best minimum would be below 0
        // The error sum (code s - m - x)^2, without the sum of x^2, which is the same for all.
        const Vec error = s * s * y.squares + N * m * m - 2 * (s * m * y.codes + s * y.products - m * total);
        const Ints better = (spread > 0) & (s >= 0) & (error < best);
        best = better ? error : best, scale = better ? s : scale, minimum = better ? m : minimum;
    }
}

template <int SIZE> INLINE void without_minima(const Groups<SIZE>& x, float most, int steps, Vec& scale) {
    Vec largest = {}, size = {};
    for (int i = 0; i < SIZE; i++) {
        Vec value = load(x[i]), its = value < 0 ? -value : value;
        largest = its > size ? value : largest, size = its > size ? its : size;
    }
    const Vec inverse = largest == 0 ? fill(0) : -1 / largest;
    scale = largest / -most;
    Vec best = fill(__builtin_inff());
    for (int step = 0; step < steps; step++) {
        Vec by = (most - 1 + 2.0f * step / steps) * inverse;
        Sums y = sums_of<SIZE, true>(x, by, Vec{}, fill(-most), fill(most - 1));
        const Vec s = y.products / y.squares, error = -y.products * s;
        const Ints better = (y.squares > 0) & (error < best);
        best = better ? error : best, scale = better ? s : scale;
    }
}

// Searches up to LANES groups, which lie one after the other: scales and, where they are wanted, minima. Not inlined: every
// caller has the same instructions, so the same bits.
template <int SIZE>
__attribute__((noinline)) void find(const float* from, int64_t count, bool minima, float most, int steps, Vec* found) {
    alignas(64) Groups<SIZE> x = {};
    for (int64_t k = 0; k < count; k++)
        for (int i = 0; i < SIZE; i++) x[i][k] = from[k * SIZE + i];
    if (minima)
        with_minima<SIZE>(x, most, steps, found[0], found[1]);
    else
        without_minima<SIZE>(x, most, steps, found[0]);
}

template <int SIZE> void search(const Search& a, int part, int parts) {
    Share share((a.count + LANES - 1) / LANES, part, parts);
    for (int64_t n = share.first * LANES; n < share.last * LANES; n += LANES) {
        const int64_t count = a.count - n < LANES ? a.count - n : LANES;
        Vec found[2];
        find<SIZE>((const float*)a.groups + n * SIZE, count, a.minima, a.most, a.steps, found);
        float* to[] = {(float*)a.scales + n, (float*)a.minima + n};
        for (int i = 0; i < (a.minima ? 2 : 1); i++) {
            if (count == LANES)
                store(to[i], found[i]);
            else
                store(to[i], found[i], count);
        }
    }
}

void search_any(const Search& a, int part, int parts) {
    if (a.size == 16)
        search<16>(a, part, parts);
    else
        search<32>(a, part, parts);
}

constexpr int SUPER = 256;         // weights of a super-block
constexpr float F16_MAX = 65504;  // f16's largest number

INLINE float inverse_of(float x) { return x == 0 ? 0 : 1 / x; }

// x to a whole number from low to high. Clamped first: a product would be contracted with the sum that rounds it.
INLINE Vec whole(Vec x, Vec low, Vec high) {
    x = x > high ? high : x;
    return rounded(x < low ? low : x);
}

// A super-block before it is written: its numbers, and codes, none below 0.
struct Super {
    f16 factors[2];                      // of scales and of minima
    uint8_t numbers[2][16], codes[SUPER];  // numbers: scales and minima
};

// numbers of `count` scales, or minima, from low to high.
INLINE void to_numbers(const float* scales, int count, f16 factor, float low, float high, uint8_t* numbers) {
    const float inverse = inverse_of(widen(factor));
    for (int g = 0; g < count; g++) {
        float x = scales[g] * inverse;
        x = x > high ? high : x;
        x = x < low ? low : x;
        numbers[g] = (uint8_t)(int32_t)__builtin_rintf(x);
    }
}

// Codes are round((x + minimum) / scale) + zero, from low to high before zero is added. A factor times a number has no
// more than 19 bits, so it is exact.
template <typename K> INLINE void to_codes(const float* x, Super& y, float low, float high, float zero) {
    alignas(64) int32_t codes[SUPER];
    const float by = widen(y.factors[0]), less = K::MINIMA ? widen(y.factors[1]) : 0;
    for (int g = 0; g < SUPER / K::SIZE; g++) {
        const float scale = by * (K::MINIMA ? y.numbers[0][g] : (int8_t)y.numbers[0][g]), inverse = inverse_of(scale);
        const float minimum = K::MINIMA ? less * y.numbers[1][g] : 0;
        for (int i = g * K::SIZE; i < (g + 1) * K::SIZE; i += LANES) {
            Vec code = whole((load(x + i) + minimum) * inverse, fill(low), fill(high)) + zero;
            Ints lanes = __builtin_convertvector(code, Ints);
            memcpy(codes + i, &lanes, sizeof lanes);
        }
    }
    for (int i = 0; i < SUPER; i++) y.codes[i] = (uint8_t)codes[i];
}

// ggml_encoders.with_minima, from the scales and minima that the search has found.
template <typename K>
INLINE void super_with_minima(const float* x, const float* scales, const float* minima, Super& y) {
    constexpr int COUNT = SUPER / K::SIZE;
    const float* found[] = {scales, minima};
    for (int i = 0; i < 2; i++) {
        float most = found[i][0];
        for (int g = 1; g < COUNT; g++) most = found[i][g] > most ? found[i][g] : most;
        most /= K::NUMBERS;
        y.factors[i] = narrow<f16>(most > F16_MAX ? F16_MAX : most);
        to_numbers(found[i], COUNT, y.factors[i], 0, K::NUMBERS, y.numbers[i]);
    }
    to_codes<K>(x, y, 0, K::MAX_CODE, 0);
}

// ggml_encoders.signed, likewise: numbers are int8.
template <typename K> INLINE void super_signed(const float* x, const float* scales, Super& y) {
    constexpr int COUNT = SUPER / K::SIZE;
    float largest = scales[0];
    for (int g = 1; g < COUNT; g++)
        largest = __builtin_fabsf(scales[g]) > __builtin_fabsf(largest) ? scales[g] : largest;
    largest /= -K::NUMBERS;
    largest = largest > F16_MAX ? F16_MAX : largest;
    y.factors[0] = narrow<f16>(largest < -F16_MAX ? -F16_MAX : largest);
    to_numbers(scales, COUNT, y.factors[0], -K::NUMBERS, K::NUMBERS - 1, y.numbers[0]);
    to_codes<K>(x, y, -K::MAX_CODE, K::MAX_CODE - 1, K::MAX_CODE);
}

// The 12 bytes of eight scales and eight minima of 6 bits (KScales.write of ggml_types.py).
INLINE uint8_t* join_k_scales(const Super& x, uint8_t* y) {
    const uint8_t *scales = x.numbers[0], *minima = x.numbers[1];
    for (int i = 0; i < 4; i++) {
        y[i] = scales[i] | (scales[i + 4] & 48) << 2;
        y[i + 4] = minima[i] | (minima[i + 4] & 48) << 2;
        y[i + 8] = (scales[i + 4] & 15) | (minima[i + 4] & 15) << 4;
    }
    return y + 12;
}

struct Q2K {
    static constexpr bool MINIMA = true;
    static constexpr int SIZE = 16, MAX_CODE = 3, NUMBERS = 15, BYTES = 84;

    static INLINE void write(Super& x, uint8_t* y) {
        for (int g = 0; g < 16; g++) *y++ = x.numbers[0][g] | x.numbers[1][g] << 4;
        for (int i = 0; i < SUPER; i += 128) y = join<32, 2>(x.codes + i, y);
        append(x.factors, 4, y);
    }
};

struct Q3K {
    static constexpr bool MINIMA = false;
    static constexpr int SIZE = 16, MAX_CODE = 4, NUMBERS = 32, BYTES = 110;

    static INLINE void write(Super& x, uint8_t* y) {
        y = join<32, 1, 2>(x.codes, y);
        for (int i = 0; i < SUPER; i += 128) y = join<32, 2>(x.codes + i, y);
        for (uint8_t& number : x.numbers[0]) number = (uint8_t)(number + NUMBERS);
        y = join<8, 4>(x.numbers[0], y);
        y = join<4, 2, 4>(x.numbers[0], y);
        append(x.factors, 2, y);
    }
};

struct Q4K {
    static constexpr bool MINIMA = true;
    static constexpr int SIZE = 32, MAX_CODE = 15, NUMBERS = 63, BYTES = 144;

    static INLINE void write(Super& x, uint8_t* y) {
        y = join_k_scales(x, append(x.factors, 4, y));
        for (int i = 0; i < SUPER; i += 64) y = join<32, 4>(x.codes + i, y);
    }
};

struct Q5K {
    static constexpr bool MINIMA = true;
    static constexpr int SIZE = 32, MAX_CODE = 31, NUMBERS = 63, BYTES = 176;

    static INLINE void write(Super& x, uint8_t* y) {
        y = join_k_scales(x, append(x.factors, 4, y));
        y = join<32, 1, 4>(x.codes, y);
        for (int i = 0; i < SUPER; i += 64) y = join<32, 4>(x.codes + i, y);
    }
};

struct Q6K {
    static constexpr bool MINIMA = false;
    static constexpr int SIZE = 16, MAX_CODE = 32, NUMBERS = 128, BYTES = 210;

    static INLINE void write(Super& x, uint8_t* y) {
        for (int i = 0; i < SUPER; i += 128) y = join<64, 4>(x.codes + i, y);
        for (int i = 0; i < SUPER; i += 128) y = join<32, 2, 4>(x.codes + i, y);
        append(x.factors, 2, append(x.numbers[0], 16, y));
    }
};

template <typename K, typename T> void encode(const Encode& a, int part, int parts) {
    constexpr int COUNT = SUPER / K::SIZE;                       // groups of a super-block
    constexpr int TOGETHER = LANES > COUNT ? LANES / COUNT : 1;  // super-blocks whose groups fill a vector
    Share share((a.supers + TOGETHER - 1) / TOGETHER, part, parts);
    for (int64_t n = share.first * TOGETHER; n < share.last * TOGETHER; n += TOGETHER) {
        const int64_t supers = a.supers - n < TOGETHER ? a.supers - n : TOGETHER;
        alignas(64) float x[TOGETHER * SUPER] = {}, found[2][TOGETHER * COUNT];
        for (int64_t i = 0; i < supers * SUPER; i += LANES) store(x + i, load((const T*)a.weight + n * SUPER + i));
        for (int g = 0; g < TOGETHER * COUNT; g += LANES) {
            Vec some[2] = {};
            find<K::SIZE>(x + g * K::SIZE, LANES, K::MINIMA, K::MAX_CODE, a.steps, some);
            store(found[0] + g, some[0]), store(found[1] + g, some[1]);
        }
        for (int64_t s = 0; s < supers; s++) {
            Super made;
            if constexpr (K::MINIMA)
                super_with_minima<K>(x + s * SUPER, found[0] + s * COUNT, found[1] + s * COUNT, made);
            else
                super_signed<K>(x + s * SUPER, found[0] + s * COUNT, made);
            K::write(made, (uint8_t*)a.blocks + (n + s) * K::BYTES);
        }
    }
}

OP(scale_search, search_any, Search)
#define ENCODE_OPS(name, K)                             \
    OP(encode_##name##_f32, (encode<K, float>), Encode) \
    OP(encode_##name##_bf16, (encode<K, bf16>), Encode) \
    OP(encode_##name##_f16, (encode<K, f16>), Encode)
ENCODE_OPS(q2_k, Q2K)
ENCODE_OPS(q3_k, Q3K)
ENCODE_OPS(q4_k, Q4K)
ENCODE_OPS(q5_k, Q5K)
ENCODE_OPS(q6_k, Q6K)
