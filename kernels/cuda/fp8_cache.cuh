// Codes and scales of a cache in e4m3, as kernels/rope/fp8_cache.py has them. Bits are moved by hand: sm_80 has no e4m3.

struct e4m3 {
    unsigned char bits;
};

constexpr int LOWEST_SCALE = 127 - 22, HIGHEST_SCALE = 127 + 7;

// Scale exponent of a head whose largest number this is: a byte, by which scale_of() and its inverse are a power of two.
__device__ inline int scale_exponent(float most) {
    // A mantissa of more than 448's, 1.75, takes one exponent more.
    return min(max((int)((__float_as_uint(most) + 0x1fffff) >> 23) - 8, LOWEST_SCALE), HIGHEST_SCALE);
}
__device__ inline float scale_of(int exponent) { return __uint_as_float((unsigned)exponent << 23); }
__device__ inline float inverse_scale(int exponent) { return __uint_as_float((unsigned)(254 - exponent) << 23); }

// The tensor cores' operand type: f16 for a cache of codes, as it has every one; else T.
template <bool CODES> struct OperandType {
    typedef T type;
};
template <> struct OperandType<true> {
    typedef f16 type;
};

// A token's weight in f16, at most 2^LIFT: much smaller ones, of long contexts, keep their bits then.
constexpr int LIFT = FP8 ? 14 : 0;

// Exponent for queries whose largest number this is: the exponent of what divides them for f16, by which that is 2^14 or more and
// below 2^15. Neither it nor its inverse may leave the range of numbers.
__device__ inline int query_exponent(float most) { return max((int)(__float_as_uint(most) >> 23) - 14, 1); }

template <> __device__ inline e4m3 from_float<e4m3>(float x) {
    const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
    const float y = fminf(fabsf(x), 448);
    const unsigned bits = __float_as_uint(y);
    const unsigned small = __float_as_uint(y + 16384) - __float_as_uint(16384.f);  // in steps of 2^-9
    const unsigned normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 960;
    return {(unsigned char)(sign | (y < 0.015625f ? small : normal))};
}
__device__ inline float to_float(e4m3 x) {
    return __uint_as_float((x.bits & 0x80u) << 24 | (x.bits & 0x7fu) << 20) * 0x1p120f;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
