// Weights in Q8_0: of 32 inputs 16 f16 scales, and the codes + 128.

#include "op.h"
#include "simd.h"
#include "blocks.h"

constexpr int GROUP = 32;  // inputs with one scale

struct Q8_0 : Blocks<2 * BLOCK, BLOCK * GROUP> {
    static constexpr int GROUPS = 1;
    static constexpr bool MINIMA = false;

    using Blocks::Blocks;
    INLINE Vec scale(int, int v) const { return halves(head, v); }
    INLINE Vec minimum(int, int) const { return Vec{}; }
    INLINE Ints four(int i, int v) const { return four_codes<8>(run, i, v); }
};

struct Encode {
    const void* weight;
    void *codes, *scales;  // scales: f32
    int64_t groups;
};

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

FORM_OPS(q8_0, Q8_0)
OP(q8_0_encode_f32, encode<float>, Encode)
OP(q8_0_encode_bf16, encode<bf16>, Encode)
OP(q8_0_encode_f16, encode<f16>, Encode)
