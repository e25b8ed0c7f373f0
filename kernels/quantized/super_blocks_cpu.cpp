// Weights in super-blocks. Scale and minimum of a group of 16 or 32 inputs are bytes times two f16 factors of their
// super-block.
//
// A super-block's head is 16 factors of scales and 16 of minima. Of each 32 inputs there are 16 scales and 16 minima,
// twice where groups have 16 inputs, and then the codes.

#include "op.h"
#include "simd.h"
#include "blocks.h"

constexpr int FACTORS = 4 * BLOCK;  // bytes

// BITS of a code; G groups of 32 inputs.
template <int BITS, int G> struct SuperBlocks : Blocks<FACTORS, G * 2 * BLOCK + BLOCK * RUN * BITS / 8> {
    static constexpr int GROUPS = G;
    static constexpr bool MINIMA = true;

    using Blocks<FACTORS, G * 2 * BLOCK + BLOCK * RUN * BITS / 8>::Blocks;
    INLINE Vec scale(int h, int v) const { return halves(this->head, v) * number(h * 2, v); }
    INLINE Vec minimum(int h, int v) const { return halves(this->head + 2 * BLOCK, v) * number(h * 2 + 1, v); }
    INLINE Ints four(int i, int v) const { return four_codes<BITS>(this->run + G * 2 * BLOCK, i, v); }

private:
    INLINE Vec number(int i, int v) const { return load((const int8_t*)this->run + i * BLOCK + v * LANES); }
};

typedef SuperBlocks<4, 1> Form4_1;
typedef SuperBlocks<4, 2> Form4_2;
typedef SuperBlocks<6, 1> Form6_1;
typedef SuperBlocks<6, 2> Form6_2;
typedef SuperBlocks<8, 1> Form8_1;
FORM_OPS(super_blocks_4_1, Form4_1)
FORM_OPS(super_blocks_4_2, Form4_2)
FORM_OPS(super_blocks_6_1, Form6_1)
FORM_OPS(super_blocks_6_2, Form6_2)
FORM_OPS(super_blocks_8_1, Form8_1)
