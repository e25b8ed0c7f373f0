// e4m3: floats of 8 bits, and an f32 scale for each 128 inputs of an output.
//
// A packed tile is 16 outputs by 128 inputs: two halves of 8 outputs, each its codes and then its scales. Codes lie in
// runs of 16 inputs, of which a run has 16 bytes of each output: so Hopper's asynchronous matmuls take them from shared
// memory (e4m3_wgmma.cu). Byte 4 i + b of those 16 is of input 2 i + {0, 8, 1, 9}[b]. A lane streams whole runs: lane 4
// g + t has runs t and t + 4 of outputs g and g + 8. cuda_layouts.py describes packed tiles.

constexpr int HALF_BYTES = 1056, PACKED_BYTES = 2 * HALF_BYTES;  // bytes
constexpr int SPAN = 128, SCALED = 128;                   // inputs of a packed tile, and those that share a scale
constexpr bool MINIMA = false, RAW = false;
constexpr int TOGETHER = 1;
constexpr bool BY_RUNS = true;  // word 2 s + h of a streamed packed tile has inputs 16 t + 2 s + {0, 8, 1, 9} of each 64

template <int RUNS> struct Runs {  // a lane's part of so many runs: words 2 s + h, of step s and output g + 8 h
    unsigned words[2 * RUNS], scales[2];
};
typedef Runs<8> PackedTile;

// A lane's parts of packed tiles in memory.
struct PackedTiles {
    const unsigned char *words, *scales;

    PackedTiles() = default;
    __device__ PackedTiles(const unsigned char* from, int lane)
        : words(from + lane % 4 * 128 + lane / 4 * 16), scales(from + 1024 + lane / 4 * 4) {}
    __device__ PackedTile stream(int tile) const {
        PackedTile y;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const uint4 x = stream16(words + tile * PACKED_BYTES + h * HALF_BYTES + q * 512);
                unsigned* const to = y.words + q * 8 + h;
                to[0] = x.x, to[2] = x.y, to[4] = x.z, to[6] = x.w;
            }
            y.scales[h] = stream4(scales + tile * PACKED_BYTES + h * HALF_BYTES);
        }
        return y;
    }
    __device__ void advance(int tiles) { words += tiles * PACKED_BYTES, scales += tiles * PACKED_BYTES; }
};

// quantized_experts.cu loads an n-tile through registers, 64 inputs at a time. Registers hold one whole packed tile of a
// warp's n-tiles, or two: then no load would be in flight while a packed tile is multiplied.
constexpr int STREAMED = 64;
typedef Runs<4> Streamed;
struct Stream {
    PackedTiles all;
    int at;

    Stream() = default;
    __device__ Stream(const unsigned char* from, int lane) : all(from, lane), at(0) {}
    __device__ Streamed get(int more) const {
        const int offset = (at + more) / 2 * PACKED_BYTES;
        Streamed y;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 x = stream16(all.words + offset + h * HALF_BYTES + (at + more) % 2 * 512);
            y.words[h] = x.x, y.words[2 + h] = x.y, y.words[4 + h] = x.z, y.words[6 + h] = x.w;
            y.scales[h] = stream4(all.scales + offset + h * HALF_BYTES);
        }
        return y;
    }
    __device__ void advance(int count) { at += count; }
};

// From shared memory, of inputs 32 part to 32 part + 31, or of all: step s has run s, a lane's inputs as everywhere
// else.
__device__ inline PackedTile load_packed_tile(unsigned from, int lane, int part = -1) {
    PackedTile y;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int s = 0; s < 8; s++)
            if (part < 0 || part == s / 2) y.words[2 * s + h] = load_shared4(from + h * HALF_BYTES + s * 128 + lane * 4);
        y.scales[h] = load_shared4(from + h * HALF_BYTES + 1024 + lane / 4 * 4);
    }
    return y;
}

// Scales for the codes of outputs lane / 4 and 8 below.
template <int RUNS> __device__ inline float2 scales(const Runs<RUNS>& tile, int) {
    return {__uint_as_float(tile.scales[0]), __uint_as_float(tile.scales[1])};
}

#include "e4m3_codes.cuh"
