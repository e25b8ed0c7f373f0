// Q4_0, Q4_1, Q5_0 and Q5_1 of weights, as `centred` and `spanned` round them, bit for bit.

#include "op.h"
#include "simd.h"
#include "ggml_types.h"

struct Encode {
    const void* weight;  // [groups, 32]
    void* blocks;        // as ggml's files hold them
    int64_t groups;
};

struct Signed {
    const void* weight;
    void *codes, *scales;  // int8, around 0; f16, none below 0
    int64_t groups;
};

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

template <typename Type, typename T> void encode(const Encode& a, int part, int parts) {
    Share share(a.groups, part, parts);
    for (int64_t g = share.first; g < share.last; g++) {
        Weights x;
        Numbers made;
        read<T>(a.weight, g, x);
        Type::round(x, made);
        Type::write(made, (uint8_t*)a.blocks + g * Type::BYTES);
    }
}

// Q5_0 in the form of Q8_0 (q8_0.signed): where the scale is below 0, codes have its sign.
template <typename T> void encode_signed(const Signed& a, int part, int parts) {
    Share share(a.groups, part, parts);
    for (int64_t g = share.first; g < share.last; g++) {
        Weights x;
        Numbers made;
        read<T>(a.weight, g, x);
        centred<16>(x, made);
        const uint16_t scale = made.factors[0].bits;
        const int sign = scale >> 15 ? -1 : 1;
        for (int i = 0; i < GROUP; i++) ((int8_t*)a.codes)[g * GROUP + i] = (int8_t)(sign * (made.codes[i] - 16));
        ((f16*)a.scales)[g].bits = scale & 0x7fff;
    }
}

#define ENCODE_OPS(name, Type, B, BITS)                               \
    OP(encode_##name##_f32, (encode<Type<B, BITS>, float>), Encode) \
    OP(encode_##name##_bf16, (encode<Type<B, BITS>, bf16>), Encode) \
    OP(encode_##name##_f16, (encode<Type<B, BITS>, f16>), Encode)
ENCODE_OPS(q4_0, Centred, Q4_0, 4)
ENCODE_OPS(q4_1, Spanned, Q4_1, 4)
ENCODE_OPS(q5_0, Centred, Q5_0, 5)
ENCODE_OPS(q5_1, Spanned, Q5_1, 5)
OP(encode_signed_q5_0_f32, encode_signed<float>, Signed)
OP(encode_signed_q5_0_bf16, encode_signed<bf16>, Signed)
OP(encode_signed_q5_0_f16, encode_signed<f16>, Signed)
