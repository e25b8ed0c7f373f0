// int4: codes of 4 bits in groups of inputs, with an f16 scale and perhaps a zero point: (code - zero) * scale, as GPTQ
// and AWQ have them.
//
// A packed tile is 16 outputs by 64 inputs, as tensor cores take them from registers: 16 bytes of codes for each of 32
// lanes; then for each SCALED inputs the scales, those of outputs g and g + 8 side by side; then, with ZEROS, for each
// SCALED inputs 16 bytes: the zero points of outputs g and g + 8 side by side. Without ZEROS they are 8. Lane 4 g + t
// has in word s the codes of inputs 16 s + 2 t and + 1 of output g in bits 0 and 16, of output g + 8 in bits 4 and 20,
// and of inputs 16 s + 2 t + 8 and + 9 of the same outputs in bits 8 and 24, and 12 and 28. cuda_layouts.py describes
// packed tiles.

constexpr int SPAN = 64, GROUPS_PER_TILE = SPAN / SCALED, PACKED_BYTES = 512 + GROUPS_PER_TILE * (32 + 16 * ZEROS);  // bytes
constexpr bool MINIMA = false;
constexpr bool BY_RUNS = false, RAW = true;  // RAW: whether raw codes are not as codes
constexpr int TOGETHER = 1;  // packed tiles that multiply_together() takes

constexpr int WORDS = 4, TABLE_WORDS = GROUPS_PER_TILE * (1 + ZEROS);
// Scales, then zero points.
__device__ constexpr int table_at(int i, int lane) {
    constexpr int G = GROUPS_PER_TILE;
    return 512 + (i < G ? i * 32 + lane / 4 * 4 : G * 32 + (i - G) * 16 + lane / 8 * 4);
}
#include "packed_tile.cuh"

// Twice `above` and the zero point of output lane / 4, or of 8 below, as its lower byte.
__device__ inline unsigned zero2(const PackedTile& tile, int step, int half, unsigned above) {
    if (!ZEROS) return above << 8 | above << 24 | 0x00080008;
    const unsigned byte = threadIdx.x / 4 % 2 * 2 + half;
    return __byte_perm(tile.tables[GROUPS_PER_TILE + step * 16 / SCALED], above, 0x4040 | byte | byte << 8);
}

// The codes of a word at bit 4 i and 16 above, more by 1024 or 128, which makes them elements.
template <class E> __device__ inline unsigned widen(unsigned word, int i);
template <> __device__ inline unsigned widen<f16>(unsigned word, int i) {
    return and_xor(word >> 4 * i, 0x000f000f, 0x64006400);
}
template <> __device__ inline unsigned widen<bf16>(unsigned word, int i) {
    return and_xor(word >> 4 * i, 0x000f000f, 0x43004300);
}

// The upper byte of -1024 or -128 less a zero point.
__device__ inline unsigned minus(f16) { return 0xe4; }
__device__ inline unsigned minus(bf16) { return 0xc3; }

// Codes less their zero points, exactly, of inputs 16 step to 16 step + 15, as the first operand of a matmul.
template <class E> __device__ inline void codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = add2<E>(widen<E>(tile.words[step], i), zero2(tile, step, i % 2, minus(E())));
}

// Codes as they are widened the fastest, and what they have too much: the zero point, and 1024 or 128.
template <class E> __device__ inline void raw_codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = widen<E>(tile.words[step], i);
}
template <class E> __device__ inline float2 offsets(const PackedTile& tile, int step) {
    const float more = unpack<E>(widen<E>(0, 0)).x;
    if (!ZEROS) return {more + 8, more + 8};
    // 0x4300 0000 + zero * 65536 is 128 + zero.
    const unsigned zeros = tile.tables[GROUPS_PER_TILE + step * 16 / SCALED], byte = threadIdx.x / 4 % 2 * 2;
    return {__uint_as_float(__byte_perm(zeros, 0x43000000, 0x7044 | byte << 8)) + (more - 128),
            __uint_as_float(__byte_perm(zeros, 0x43000000, 0x7144 | byte << 8)) + (more - 128)};
}

#include "f16_scales.cuh"
