// Weights of 4 bits with a scale for each group of inputs. A group's head is 16 f16 scales, and where `MIN` 16 zero
// points, bytes below 128. They lie as GPUs have them, so that an expert is repacked by moving bytes and nibbles.

#include "op.h"
#include "simd.h"
#include "blocks.h"

template <bool MIN> struct Int4 : Blocks<(MIN ? 3 : 2) * BLOCK, BLOCK * RUN / 2> {
    static constexpr int GROUPS = 1;
    static constexpr bool MINIMA = MIN;

    using Blocks<(MIN ? 3 : 2) * BLOCK, BLOCK * RUN / 2>::Blocks;
    INLINE Vec scale(int, int v) const { return halves(this->head, v); }
    INLINE Vec minimum(int, int v) const {
        if (!MIN) return Vec{};
        return halves(this->head, v) * (load((const int8_t*)this->head + 2 * BLOCK + v * LANES) - 8);  // the usual zero
    }
    INLINE Ints four(int i, int v) const { return four_codes<4>(this->run, i, v); }
};

FORM_OPS(int4, Int4<false>)
FORM_OPS(int4_zeros, Int4<true>)
