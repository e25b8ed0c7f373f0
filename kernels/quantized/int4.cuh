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

struct PackedTile {  // a lane's part
    unsigned words[4], scales[GROUPS_PER_TILE], zeros[GROUPS_PER_TILE];
};

// Offset of a lane's scales and zero points of group i in a packed tile.
__device__ inline int scales_at(int i, int lane) { return 512 + i * 32 + lane / 4 * 4; }
__device__ inline int zeros_at(int i, int lane) { return 512 + GROUPS_PER_TILE * 32 + i * 16 + lane / 8 * 4; }

// A lane's parts of packed tiles in memory.
struct PackedTiles {
    const unsigned char* from;
    int lane;

    PackedTiles() = default;
    __device__ PackedTiles(const unsigned char* from, int lane) : from(from), lane(lane) {}
    __device__ PackedTile stream(int tile) const {
        const unsigned char* const at = from + tile * PACKED_BYTES;
        PackedTile y;
        const uint4 x = stream16(at + lane * 16);
        y.words[0] = x.x, y.words[1] = x.y, y.words[2] = x.z, y.words[3] = x.w;
#pragma unroll
        for (int i = 0; i < GROUPS_PER_TILE; i++) {
            y.scales[i] = stream4(at + scales_at(i, lane));
            y.zeros[i] = ZEROS ? stream4(at + zeros_at(i, lane)) : 0;
        }
        return y;
    }
    __device__ void advance(int tiles) { from += tiles * PACKED_BYTES; }
};

#include "whole_stream.cuh"

// From shared memory.
__device__ inline PackedTile load_packed_tile(unsigned from, int lane, int = -1) {
    PackedTile y;
    const uint4 words = load_shared16(from + lane * 16);
    y.words[0] = words.x, y.words[1] = words.y, y.words[2] = words.z, y.words[3] = words.w;
#pragma unroll
    for (int i = 0; i < GROUPS_PER_TILE; i++) {
        y.scales[i] = load_shared4(from + scales_at(i, lane));
        y.zeros[i] = ZEROS ? load_shared4(from + zeros_at(i, lane)) : 0;
    }
    return y;
}

// Scales for the codes of outputs lane / 4 and 8 below, of inputs from 16 step on.
__device__ inline float2 scales(const PackedTile& tile, int step) { return unpack<f16>(tile.scales[step * 16 / SCALED]); }
__device__ inline float2 minima(const PackedTile&, int) { return {}; }

// Twice `above` and the zero point of output lane / 4, or of 8 below, as its lower byte.
__device__ inline unsigned zero2(const PackedTile& tile, int step, int half, unsigned above) {
    if (!ZEROS) return above << 8 | above << 24 | 0x00080008;
    const unsigned byte = threadIdx.x / 4 % 2 * 2 + half;
    return __byte_perm(tile.zeros[step * 16 / SCALED], above, 0x4040 | byte | byte << 8);
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
    const unsigned zeros = tile.zeros[step * 16 / SCALED], byte = threadIdx.x / 4 % 2 * 2;
    return {__uint_as_float(__byte_perm(zeros, 0x43000000, 0x7044 | byte << 8)) + (more - 128),
            __uint_as_float(__byte_perm(zeros, 0x43000000, 0x7144 | byte << 8)) + (more - 128)};
}

// Weights of the same, rounded once.
template <class E> __device__ inline void weights(const PackedTile& tile, int step, unsigned (&a)[4]);
template <> __device__ inline void weights<f16>(const PackedTile& tile, int step, unsigned (&a)[4]) {
    codes<f16>(tile, step, a);
    const unsigned both = tile.scales[step * 16 / SCALED];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = mul2<f16>(a[i], __byte_perm(both, 0, i % 2 ? 0x3232 : 0x1010));
}
template <> __device__ inline void weights<bf16>(const PackedTile& tile, int step, unsigned (&a)[4]) {
    const float2 by = scales(tile, step);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // (128 + code) * scale and (128 + zero) * scale have no more bits than a float.
        const float scale = i % 2 ? by.y : by.x;
        const float less = __uint_as_float(zero2(tile, step, i % 2, 0xc3) << 16) * scale;
        const unsigned more = widen<bf16>(tile.words[step], i);
        a[i] = pack<bf16>(fmaf(__uint_as_float(more << 16), scale, less),
                          fmaf(__uint_as_float(more & 0xffff0000), scale, less));
    }
}
