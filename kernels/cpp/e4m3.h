// e4m3 codes and their scales as kernels/rope/fp8_cache.py has them. simd.h comes before.

struct e4m3 {
    uint8_t bits;
};

constexpr uint32_t LOWEST = 127 - 22, HIGHEST = 127 + 7;  // exponents of scales

INLINE float from_bits(uint32_t bits) {
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE uint32_t to_bits(float x) {
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}

INLINE float scale_of(uint8_t exponent) { return from_bits((uint32_t)exponent << 23); }

// Exponent and mantissa are moved to where f32 has them; a power of two makes up for the other bias.
INLINE Vec load(const e4m3* p) {
    Ints code = load_bytes((const uint8_t*)p);
    return (Vec)((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
}

INLINE uint8_t encode(float x) {
    uint32_t bits = to_bits(x), sign = bits >> 24 & 0x80;
    float y = from_bits(bits & 0x7fffffff);
    if (!(y <= 448)) return sign | 0x7e;
    if (y < 0x1p-6f) return sign | (to_bits(y + 0x1p14f) - to_bits(0x1p14f));  // in steps of 2^-9
    bits = to_bits(y);
    return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 960);  // to the nearest, ties to even
}

// A head's codes; its scale's exponent.
template <typename T> INLINE uint8_t quantize(const T* x, int64_t dim, e4m3* y) {
    uint32_t most = 0;
    for (int64_t i = 0; i < dim; i++) {
        uint32_t size = to_bits(widen(x[i])) & 0x7fffffff;
        most = size > most ? size : most;
    }
    uint32_t exponent = (most + 0x1fffff) >> 23;  // a mantissa of more than 448's, 1.75, takes one exponent more
    exponent = exponent < LOWEST + 8 ? LOWEST : exponent > HIGHEST + 8 ? HIGHEST : exponent - 8;
    float by = from_bits((254 - exponent) << 23);
    for (int64_t i = 0; i < dim; i++) y[i].bits = encode(widen(x[i]) * by);
    return exponent;
}
