// Weights in MXFP4: of 32 inputs 16 scales e8m0, and codes e2m1 of 4 bits. Twice a code's number is whole: a shuffle looks
// it up, 12 above it, and scales are half as large.

#include "op.h"
#include "simd.h"
#include "blocks.h"

struct Mxfp4 : Blocks<BLOCK, BLOCK * RUN / 2> {
    static constexpr int GROUPS = 1;
    static constexpr bool MINIMA = false;

    using Blocks::Blocks;
    // 2^(x - 128); the smallest two have no exponent, and the largest code is infinite here.
    INLINE Vec scale(int, int v) const {
        Ints x;
#if defined(__AVX512F__)
        x = (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)head));
        (void)v;
#else
        for (int i = 0; i < LANES; i++) x[i] = head[v * LANES + i];
#endif
        const Ints small = x < 2;
        return (Vec)((small & ((x + 1) << 21)) | (~small & ((x - 1 - (x == 255)) << 23)));
    }
    INLINE Vec minimum(int, int) const { return Vec{}; }
    INLINE Ints four(int i, int v) const {
        const Ints codes = four_codes<4>(run, i, v);
        alignas(16) static constexpr int8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX512BW__)
        return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(*(const __m128i*)NUMBERS), (__m512i)codes);
#elif defined(__AVX2__)
        return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*(const __m128i*)NUMBERS), (__m256i)codes);
#else
        uint8_t each[4 * LANES];
        memcpy(each, &codes, sizeof(each));
        for (int j = 0; j < 4 * LANES; j++) each[j] = NUMBERS[each[j]];
        Ints found;
        memcpy(&found, each, sizeof(each));
        return found;
#endif
    }
};

FORM_OPS(mxfp4, Mxfp4)
