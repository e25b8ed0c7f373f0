// How ggml's blocks hold numbers of fewer than 8 bits (kernels/quantized/ggml_types.py). simd.h comes before.

// COUNT bytes, each of 8 / BITS neighbours at a distance of COUNT: their bits from SHIFT on (Bits.write).
template <int COUNT, int BITS, int SHIFT = 0> INLINE uint8_t* join(const uint8_t* x, uint8_t* y) {
    for (int i = 0; i < COUNT; i++) {
        int made = 0;
        for (int k = 0; k < 8 / BITS; k++) made |= (x[k * COUNT + i] >> SHIFT & ((1 << BITS) - 1)) << BITS * k;
        y[i] = (uint8_t)made;
    }
    return y + COUNT;
}

INLINE uint8_t* append(const void* x, int bytes, uint8_t* y) {
    memcpy(y, x, bytes);
    return y + bytes;
}
