// Weights as blocks of ggml's types, as ggml_encoders.py rounds them, bit for bit: Q4_0, Q4_1, Q5_0 and Q5_1 by `centred`
// and `spanned`; the K types by scales of groups, and minima, with which little is lost: scale_search.py has the method.
//
// Each lane of a vector has a group of its own in that search, so that nothing is added across lanes.

#include "op.h"
#include "simd.h"
#include "ggml_types.h"

struct Search {
    const void* groups;     // f32 [count, size]; size is 16 or 32
    void *scales, *minima;  // f32 [count]; minima null: codes are -most to most - 1
    int64_t count, size, most, steps;
};

struct Encode {
    const void* weight;  // [supers, 32 or 256]
    void* blocks;        // as ggml's files hold them
    int64_t supers, steps;  // steps: of the search
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

constexpr float F16_MAX = 65504;  // f16's largest number

INLINE float inverse_of(float x) { return x == 0 ? 0 : 1 / x; }

// x to a whole number from low to high. Clamped first: a product would be contracted with the sum that rounds it.
INLINE Vec whole(Vec x, Vec low, Vec high) {
    x = x > high ? high : x;
    return rounded(x < low ? low : x);
}

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
template <typename K> INLINE void to_codes(const float* x, Numbers& y, float low, float high, float zero) {
    alignas(64) int32_t codes[SUPER];
    const float by = widen(y.factors[0]), less = K::MINIMA ? widen(y.factors[1]) : 0;
    for (int g = 0; g < SUPER / K::SIZE; g++) {
        const float scale = by * (K::MINIMA ? y.numbers[g] : (int8_t)y.numbers[g]), inverse = inverse_of(scale);
        const float minimum = K::MINIMA ? less * y.numbers[SUPER / K::SIZE + g] : 0;
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
INLINE void super_with_minima(const float* x, const float* scales, const float* minima, Numbers& y) {
    constexpr int COUNT = SUPER / K::SIZE;
    const float* found[] = {scales, minima};
    for (int i = 0; i < 2; i++) {
        float most = found[i][0];
        for (int g = 1; g < COUNT; g++) most = found[i][g] > most ? found[i][g] : most;
        most /= K::NUMBERS;
        y.factors[i] = narrow<f16>(most > F16_MAX ? F16_MAX : most);
        to_numbers(found[i], COUNT, y.factors[i], 0, K::NUMBERS, y.numbers + i * COUNT);
    }
    to_codes<K>(x, y, 0, K::MAX_CODE, 0);
}

// ggml_encoders.signed, likewise: numbers are int8.
template <typename K> INLINE void super_signed(const float* x, const float* scales, Numbers& y) {
    constexpr int COUNT = SUPER / K::SIZE;
    float largest = scales[0];
    for (int g = 1; g < COUNT; g++)
        largest = __builtin_fabsf(scales[g]) > __builtin_fabsf(largest) ? scales[g] : largest;
    largest /= -K::NUMBERS;
    largest = largest > F16_MAX ? F16_MAX : largest;
    y.factors[0] = narrow<f16>(largest < -F16_MAX ? -F16_MAX : largest);
    to_numbers(scales, COUNT, y.factors[0], -K::NUMBERS, K::NUMBERS - 1, y.numbers);
    to_codes<K>(x, y, -K::MAX_CODE, K::MAX_CODE - 1, K::MAX_CODE);
}

// A type: its block, whether groups have minima and how many weights, the largest code and number of a scale, and by how
// much scales are stored larger than they are.
template <class B, bool MINIMA_, int SIZE_, int MAX_CODE_, int NUMBERS_, int ABOVE_ = 0> struct Type : B {
    static constexpr bool MINIMA = MINIMA_;
    static constexpr int SIZE = SIZE_, MAX_CODE = MAX_CODE_, NUMBERS = NUMBERS_, ABOVE = ABOVE_;
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
            Numbers made;
            if constexpr (K::MINIMA)
                super_with_minima<K>(x + s * SUPER, found[0] + s * COUNT, found[1] + s * COUNT, made);
            else
                super_signed<K>(x + s * SUPER, found[0] + s * COUNT, made);
            for (int g = 0; g < COUNT; g++) made.numbers[g] = (uint8_t)(made.numbers[g] + K::ABOVE);
            K::write(made, (uint8_t*)a.blocks + (n + s) * K::BYTES);
        }
    }
}

constexpr int GROUP = 32, VECTORS = GROUP / LANES;

typedef Vec Weights[VECTORS];

template <typename T> INLINE void read(const void* weight, int64_t group, Weights& x) {
    for (int v = 0; v < VECTORS; v++) x[v] = load((const T*)weight + group * GROUP + v * LANES);
}

INLINE void find_ends(const Weights& x, float& low, float& high) {
    Vec least = x[0], most = x[0];
    for (int v = 1; v < VECTORS; v++) least = x[v] < least ? x[v] : least, most = x[v] > most ? x[v] : most;
    low = -largest(-least), high = largest(most);
}

// Codes are (x - less) / scale, clamped to -zero and most - zero, plus zero, rounded half up. Clamped before zero is
// added: a product would be contracted with the sum.
INLINE void to_codes(const Weights& x, float less, float scale, float zero, float most, uint8_t* y) {
    alignas(64) int32_t codes[GROUP];
    const float inverse = scale == 0 ? 0 : 1 / scale;
    const Vec low = fill(-zero), high = fill(most - zero);
    for (int v = 0; v < VECTORS; v++) {
        Vec code = (x[v] - less) * inverse;
        code = code > high ? high : code;
        code = code < low ? low : code;
        const Ints whole = __builtin_convertvector(code + (zero + 0.5f), Ints);
        memcpy(codes + v * LANES, &whole, sizeof whole);
    }
    for (int i = 0; i < GROUP; i++) y[i] = (uint8_t)codes[i];
}

// With the scale that makes -MIDDLE of the largest weight, the first one where several are as large.
template <int MIDDLE> INLINE void centred(const Weights& x, Numbers& y) {
    float low, high;
    find_ends(x, low, high);
    float end = high > -low ? high : low;
    if (high == -low) {
        alignas(64) float each[GROUP];
        for (int v = 0; v < VECTORS; v++) store(each + v * LANES, x[v]);
        int first = 0;
        while (each[first] != low && each[first] != high) first++;
        end = each[first];
    }
    const float scale = end / -MIDDLE;
    y.factors[0] = narrow<f16>(scale);
    to_codes(x, 0, scale, MIDDLE, 2 * MIDDLE - 1, y.codes);
}

template <int MAX_CODE> INLINE void spanned(const Weights& x, Numbers& y) {
    float low, high;
    find_ends(x, low, high);
    const float scale = (high - low) / MAX_CODE;
    y.factors[0] = narrow<f16>(scale), y.factors[1] = narrow<f16>(low);
    to_codes(x, low, scale, 0, MAX_CODE, y.codes);
}

template <class B, int BITS> struct Centred : B {
    static INLINE void round(const Weights& x, Numbers& y) { centred<1 << (BITS - 1)>(x, y); }
};

template <class B, int BITS> struct Spanned : B {
    static INLINE void round(const Weights& x, Numbers& y) { spanned<(1 << BITS) - 1>(x, y); }
};

template <typename G, typename T> void encode_groups(const Encode& a, int part, int parts) {
    Share share(a.supers, part, parts);
    for (int64_t g = share.first; g < share.last; g++) {
        Weights x;
        Numbers made;
        read<T>(a.weight, g, x);
        G::round(x, made);
        G::write(made, (uint8_t*)a.blocks + g * G::BYTES);
    }
}

OP(scale_search, search_any, Search)
#define ENCODE_OPS(name, encode, ...)                             \
    typedef __VA_ARGS__ name;                                     \
    OP(encode_##name##_f32, (encode<name, float>), Encode)        \
    OP(encode_##name##_bf16, (encode<name, bf16>), Encode)        \
    OP(encode_##name##_f16, (encode<name, f16>), Encode)
ENCODE_OPS(q4_0, encode_groups, Centred<Q4_0, 4>)
ENCODE_OPS(q4_1, encode_groups, Spanned<Q4_1, 4>)
ENCODE_OPS(q5_0, encode_groups, Centred<Q5_0, 5>)
ENCODE_OPS(q5_1, encode_groups, Spanned<Q5_1, 5>)
ENCODE_OPS(q2_k, encode, Type<Q2_K, true, 16, 3, 15>)
ENCODE_OPS(q3_k, encode, Type<Q3_K, false, 16, 4, 32, 32>)
ENCODE_OPS(q4_k, encode, Type<Q4_K, true, 32, 15, 63>)
ENCODE_OPS(q5_k, encode, Type<Q5_K, true, 32, 31, 63>)
ENCODE_OPS(q6_k, encode, Type<Q6_K, false, 16, 32, 128>)
