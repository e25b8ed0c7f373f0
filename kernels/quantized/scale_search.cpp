// Scales of groups of weights, and minima, with which little is lost when they are rounded: scale_search.py says how.

#include "op.h"
#include "simd.h"

struct Search {
    const void* groups;     // f32 [count, size]; size is 16 or 32
    void *scales, *minima;  // f32 [count]; minima null: codes are -most to most - 1
    int64_t count, size, most, steps;
};

// x, which is no larger than 2^21, to a whole number.
INLINE Vec rounded(Vec x) {
    const Vec shift = fill(12582912);  // 1.5 * 2^23
    return (x + shift) - shift;
}
INLINE Vec between(Vec x, float low, float high) {
    x = x < low ? fill(low) : x;
    return x > high ? fill(high) : x;
}

struct Sums {
    float codes, squares, products;
};

template <int SIZE> INLINE Sums sums_of(const float* x, float inverse, float less, float low, float high) {
    Vec codes = {}, squares = {}, products = {};
    for (int i = 0; i < SIZE; i += LANES) {
        Vec value = load(x + i), code = rounded(between((value - less) * inverse, low, high));
        codes += code, squares += code * code, products += code * value;
    }
    return {sum(codes), sum(squares), sum(products)};
}

template <int SIZE> INLINE void with_minimum(const float* x, int most, int steps, float& scale, float& minimum) {
    float low = 0, high = 0, total = 0;
    for (int i = 0; i < SIZE; i++) {
        low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
        total += x[i];
    }
    const float span = high - low;
    scale = span / most, minimum = -low;
    if (span == 0) return;
    float best = __builtin_inff();
    for (int step = 0; step < steps; step++) {
        Sums y = sums_of<SIZE>(x, (most - 1 + 2.0f * step / steps) / span, low, 0, most);
        const float spread = SIZE * y.squares - y.codes * y.codes;
        if (!(spread > 0)) continue;
        float s = (SIZE * y.products - y.codes * total) / spread, m = (s * y.codes - total) / SIZE;
        if (m < 0) s = y.products / y.squares, m = 0;  // the best minimum would be below 0
        // Of sum (code s - m - x)^2, without the sum of x^2, which is the same for all.
        const float error = s * s * y.squares + SIZE * m * m - 2 * (s * m * y.codes + s * y.products - m * total);
        if (s >= 0 && error < best) best = error, scale = s, minimum = m;
    }
}

template <int SIZE> INLINE void without_minimum(const float* x, int most, int steps, float& scale) {
    float largest = 0;
    for (int i = 0; i < SIZE; i++)
        if ((x[i] < 0 ? -x[i] : x[i]) > (largest < 0 ? -largest : largest)) largest = x[i];
    scale = largest / -most;
    if (largest == 0) return;
    float best = __builtin_inff();
    for (int step = 0; step < steps; step++) {
        Sums y = sums_of<SIZE>(x, -(most - 1 + 2.0f * step / steps) / largest, 0, -most, most - 1);
        if (!(y.squares > 0)) continue;
        const float s = y.products / y.squares, error = -y.products * s;
        if (error < best) best = error, scale = s;
    }
}

template <int SIZE> void search(const Search& a, int part, int parts) {
    Share share(a.count, part, parts);
    for (int64_t n = share.first; n < share.last; n++) {
        const float* x = (const float*)a.groups + n * SIZE;
        float& scale = ((float*)a.scales)[n];
        if (a.minima)
            with_minimum<SIZE>(x, a.most, a.steps, scale, ((float*)a.minima)[n]);
        else
            without_minimum<SIZE>(x, a.most, a.steps, scale);
    }
}

void search_any(const Search& a, int part, int parts) {
    if (a.size == 16)
        search<16>(a, part, parts);
    else
        search<32>(a, part, parts);
}

OP(scale_search, search_any, Search)
