// e4m3: floats of 8 bits, and an f32 scale for each 128 inputs of an output.
//
// A piece is 16 outputs by 128 inputs: two halves of 8 outputs, each its codes and then its scales. Codes lie in runs of
// 16 inputs, of which a run has 16 bytes of each output: so Hopper's asynchronous matmuls take them from shared memory
// (e4m3_wgmma.cu). Byte 4 i + b of those 16 is of input 2 i + {0, 8, 1, 9}[b]. A lane streams whole runs: lane 4 g + t
// has runs t and t + 4 of outputs g and g + 8. e4m3_wide.py makes pieces.

constexpr int HALF_PIECE = 1056, PIECE = 2 * HALF_PIECE;  // bytes
constexpr int SPAN = 128, SCALED = 128;                   // inputs of a piece, and those that share a scale
constexpr bool MINIMA = false;
constexpr bool BY_RUNS = true;  // word 2 s + h of a streamed piece has inputs 16 t + 2 s + {0, 8, 1, 9} of each 64

struct Piece {  // a lane's part: words 2 s + h, of step s and output g + 8 h
    unsigned words[16], scales[2];
};

// A lane's parts of pieces in memory.
struct Pieces {
    const unsigned char *words, *scales;

    Pieces() = default;
    __device__ Pieces(const unsigned char* from, int lane)
        : words(from + lane % 4 * 128 + lane / 4 * 16), scales(from + 1024 + lane / 4 * 4) {}
    __device__ Piece stream(int piece) const {
        Piece y;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const uint4 x = stream16(words + piece * PIECE + h * HALF_PIECE + q * 512);
                unsigned* const to = y.words + q * 8 + h;
                to[0] = x.x, to[2] = x.y, to[4] = x.z, to[6] = x.w;
            }
            y.scales[h] = stream4(scales + piece * PIECE + h * HALF_PIECE);
        }
        return y;
    }
    __device__ void advance(int pieces) { words += pieces * PIECE, scales += pieces * PIECE; }
};

// From shared memory, of inputs 32 part to 32 part + 31, or of all: step s has run s, a lane's inputs as everywhere else.
__device__ inline Piece shared_piece(unsigned from, int lane, int part = -1) {
    Piece y;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int s = 0; s < 8; s++)
            if (part < 0 || part == s / 2) y.words[2 * s + h] = load_shared4(from + h * HALF_PIECE + s * 128 + lane * 4);
        y.scales[h] = load_shared4(from + h * HALF_PIECE + 1024 + lane / 4 * 4);
    }
    return y;
}

// What the codes of outputs lane / 4 and 8 below are multiplied by.
__device__ inline float2 scales(const Piece& piece, int) {
    return {__uint_as_float(piece.scales[0]), __uint_as_float(piece.scales[1])};
}
__device__ inline float2 minima(const Piece&, int) { return {}; }

#include "e4m3_codes.cuh"
