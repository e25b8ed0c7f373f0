// e4m3: floats of 8 bits, and an f32 scale for each 32 inputs of an output.
//
// A piece is 16 outputs by 32 inputs, as q8_0.cuh has them: 16 bytes of codes for each of 32 lanes; then the scales, those
// of outputs g and g + 8 side by side. Lane 4 g + t has, in word 2 s + h, the codes of output g + 8 h and of inputs
// 16 s + 2 t, + 8, + 1 and + 9. e4m3_cuda.py makes pieces.

constexpr int PIECE = 576, SPAN = 32, SCALED = 32;  // bytes of a piece, its inputs, and those that share a scale
constexpr bool MINIMA = false;
constexpr bool BY_RUNS = false;

struct Piece {  // a lane's part
    unsigned words[4], scales[2];
};

// A lane's parts of pieces in memory.
struct Pieces {
    const unsigned char *words, *scales;

    Pieces() = default;
    __device__ Pieces(const unsigned char* from, int lane) : words(from + lane * 16), scales(from + 512 + lane / 4 * 8) {}
    __device__ Piece stream(int piece) const {
        Piece y;
        const uint4 x = stream16(words + piece * PIECE);
        y.words[0] = x.x, y.words[1] = x.y, y.words[2] = x.z, y.words[3] = x.w;
        y.scales[0] = stream4(scales + piece * PIECE), y.scales[1] = stream4(scales + piece * PIECE + 4);
        return y;
    }
    __device__ void advance(int pieces) { words += pieces * PIECE, scales += pieces * PIECE; }
};

#include "whole_stream.cuh"

// From shared memory.
__device__ inline Piece shared_piece(unsigned from, int lane, int = -1) {
    Piece y;
    const uint4 words = load_shared16(from + lane * 16);
    y.words[0] = words.x, y.words[1] = words.y, y.words[2] = words.z, y.words[3] = words.w;
    y.scales[0] = load_shared4(from + 512 + lane / 4 * 8), y.scales[1] = load_shared4(from + 516 + lane / 4 * 8);
    return y;
}

// What the codes of outputs lane / 4 and 8 below are multiplied by, of inputs from 16 step on.
__device__ inline float2 scales(const Piece& piece, int step) {
    return {__uint_as_float(piece.scales[0]), __uint_as_float(piece.scales[1])};
}
__device__ inline float2 minima(const Piece&, int) { return {}; }

#include "e4m3_codes.cuh"
