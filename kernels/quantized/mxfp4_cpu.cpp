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
        const Ints x = load_bytes(head + v * LANES), small = x < 2;
        return (Vec)((small & ((x + 1) << 21)) | (~small & ((x - 1 - (x == 255)) << 23)));
    }
    INLINE Vec minimum(int, int) const { return Vec{}; }
    INLINE Ints four(int i, int v) const {
        alignas(16) static constexpr uint8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return look_up(NUMBERS, four_codes<4>(run, i, v));
    }
};

FORM_OPS(mxfp4, Mxfp4)
