// mxfp4: floats of 4 bits, e2m1, and a scale e8m0 for each 32 inputs of an output: code * 2^(scale - 127) (OCP
// Microscaling Formats v1.0).
//
// A packed tile is 16 outputs by 64 inputs, as tensor cores take them from registers: 16 bytes of codes for each of 32
// lanes, in int4.cuh's order; then for each output g below 8 the scales of outputs g and g + 8 of the first 32 inputs,
// and those of the second. cuda_layouts.py describes packed tiles.

constexpr int PACKED_BYTES = 544, SPAN = 64, SCALED = 32;  // bytes of a packed tile, its inputs, and those that share a scale
constexpr int WORDS = 4, TABLE_WORDS = 1, TOGETHER = 1;
constexpr bool MINIMA = false, BY_RUNS = false, RAW = false;
__device__ constexpr int table_at(int, int lane) { return 512 + lane / 4 * 4; }
#include "packed_tile.cuh"

// 2^(byte - 127): a byte is an f32's exponent, but for 0, which a number below the normal ones stands for.
__device__ inline float power(unsigned word, int byte) {
    const unsigned exponent = byte < 3 ? (word & 0xff << 8 * byte) << (23 - 8 * byte) : word >> 24 << 23;
    return __uint_as_float(max(exponent, 0x00400000u));
}

// Scales for the codes of outputs lane / 4 and 8 below, of inputs from 16 step on.
__device__ inline float2 scales(const PackedTile& tile, int step) {
    const int first = step * 16 / SCALED * 2;
    return {power(tile.tables[0], first), power(tile.tables[0], first + 1)};
}

// The codes of a word at bit 4 i and 16 above as elements, exactly: exponent and mantissa are moved to where those of E
// lie, and a power of two makes up for the other bias. Both formats have the smallest code, 0.5, as they have it.
template <class E> __device__ inline unsigned element2(unsigned word, int i);
template <> __device__ inline unsigned element2<f16>(unsigned word, int i) {
    const unsigned below = i < 3 ? word << (9 - 4 * i) : word >> 3;
    return mul2<f16>((word << (12 - 4 * i) & 0x80008000) | (below & 0x0e000e00), 0x74007400);  // 2^14
}
template <> __device__ inline unsigned element2<bf16>(unsigned word, int i) {
    // A product has a code twice, where its sign has to be and where the rest: integer units are busier than those that
    // multiply.
    const unsigned code = i % 2 ? (word >> 4 * (i - 1) & 0x00f000f0) * 0x0104 : (word >> 4 * i & 0x000f000f) * 0x1040;
    return mul2<bf16>(code & 0x81c081c0, 0x7e807e80);  // 2^126
}

// Codes of inputs 16 step to 16 step + 15, as the first operand of a matmul.
template <class E> __device__ inline void codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = element2<E>(tile.words[step], i);
}

#include "packed_weights.cuh"
