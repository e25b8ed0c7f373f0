// Values of the codes of e4m3.cuh's and e4m3_wide.cuh's tiles.

// The codes of bytes 0 and 2 as 16-bit elements, exactly: exponent and mantissa are moved to where those of E lie, and
// a power of two makes up for the other bias. Both formats have the smallest codes as they have them.
template <class E> __device__ inline unsigned element2(unsigned word);
template <> __device__ inline unsigned element2<f16>(unsigned word) {
    return mul2<f16>((word & 0x00800080) << 8 | (word & 0x007f007f) << 7, 0x5c005c00);  // 2^8
}
template <> __device__ inline unsigned element2<bf16>(unsigned word) {
    return mul2<bf16>((word & 0x00800080) << 8 | (word & 0x007f007f) << 4, 0x7b807b80);  // 2^120
}

// Codes of inputs 16 step to 16 step + 15, as the first operand of a matmul.
template <class E, class P> __device__ inline void codes(const P& tile, int step, unsigned (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned word = tile.words[2 * step + h];
        a[h] = element2<E>(word), a[2 + h] = element2<E>(word >> 8);
    }
}

#include "packed_weights.cuh"
