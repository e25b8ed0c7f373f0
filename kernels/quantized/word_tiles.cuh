// Packed tiles with four words of codes for each of 32 lanes, and then SCALE_WORDS words of scales for outputs g and g
// + 8: where lane 4 g + t has its part.

constexpr bool MINIMA = false, BY_RUNS = false;

struct PackedTile {  // a lane's part
    unsigned words[4], scales[SCALE_WORDS];
};

// A lane's parts of packed tiles in memory.
struct PackedTiles {
    const unsigned char *words, *scales;

    PackedTiles() = default;
    __device__ PackedTiles(const unsigned char* from, int lane)
        : words(from + lane * 16), scales(from + 512 + lane / 4 * (4 * SCALE_WORDS)) {}
    __device__ PackedTile stream(int tile) const {
        PackedTile y;
        const uint4 x = stream16(words + tile * PACKED_BYTES);
        y.words[0] = x.x, y.words[1] = x.y, y.words[2] = x.z, y.words[3] = x.w;
#pragma unroll
        for (int i = 0; i < SCALE_WORDS; i++) y.scales[i] = stream4(scales + tile * PACKED_BYTES + 4 * i);
        return y;
    }
    __device__ void advance(int tiles) { words += tiles * PACKED_BYTES, scales += tiles * PACKED_BYTES; }
};

#include "whole_stream.cuh"

// From shared memory.
__device__ inline PackedTile load_packed_tile(unsigned from, int lane, int = -1) {
    PackedTile y;
    const uint4 words = load_shared16(from + lane * 16);
    y.words[0] = words.x, y.words[1] = words.y, y.words[2] = words.z, y.words[3] = words.w;
#pragma unroll
    for (int i = 0; i < SCALE_WORDS; i++) y.scales[i] = load_shared4(from + 512 + 4 * i + lane / 4 * (4 * SCALE_WORDS));
    return y;
}

__device__ inline float2 minima(const PackedTile&, int) { return {}; }
