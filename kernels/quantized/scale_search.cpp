// Scales of groups of weights, and minima, with which little is lost when they are rounded: scale_search.py says how.
//
// Each lane of a vector has a group of its own, so that nothing is added across lanes.

#include "op.h"
#include "simd.h"

struct Search {
    const void* groups;     // f32 [count, size]; size is 16 or 32
    void *scales, *minima;  // f32 [count]; minima null: codes are -most to most - 1
    int64_t count, size, most, steps;
};

// Of LANES groups, element after element.
template <int SIZE> using Groups = float[SIZE][LANES];

// x, which is no larger than 2^21, to a whole number.
INLINE Vec rounded(Vec x) {
    const Vec shift = fill(12582912);  // 1.5 * 2^23
    return (x + shift) - shift;
}

struct Sums {
    Vec codes, squares, products;
};

// Of the codes that (x - less) * inverse has, no lower than `low`, which is none where it cannot be lower anyway.
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
        // Of sum (code s - m - x)^2, without the sum of x^2, which is the same for all.
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

template <int SIZE> void search(const Search& a, int part, int parts) {
    Share share((a.count + LANES - 1) / LANES, part, parts);
    for (int64_t n = share.first * LANES; n < share.last * LANES; n += LANES) {
        const int64_t count = a.count - n < LANES ? a.count - n : LANES;
        alignas(64) Groups<SIZE> x = {};
        const float* from = (const float*)a.groups + n * SIZE;
        for (int64_t k = 0; k < count; k++)
            for (int i = 0; i < SIZE; i++) x[i][k] = from[k * SIZE + i];
        Vec found[2];
        if (a.minima)
            with_minima<SIZE>(x, a.most, a.steps, found[0], found[1]);
        else
            without_minima<SIZE>(x, a.most, a.steps, found[0]);
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

OP(scale_search, search_any, Search)
