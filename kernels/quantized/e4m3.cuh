// e4m3: floats of 8 bits, and an f32 scale for each 32 inputs of an output.
//
// A packed tile is 16 outputs by 32 inputs, as q8_0.cuh has them: 16 bytes of codes for each of 32 lanes; then the
// scales, those of outputs g and g + 8 side by side. Lane 4 g + t has, in word 2 s + h, the codes of output g + 8 h and
// of inputs 16 s + 2 t, + 8, + 1 and + 9. cuda_layouts.py describes packed tiles.

constexpr int PACKED_BYTES = 576, SPAN = 32, SCALED = 32;  // bytes of a packed tile, its inputs, and those that share a scale
constexpr int WORDS = 4, TABLE_WORDS = 2, TOGETHER = 1;
constexpr bool MINIMA = false, BY_RUNS = false, RAW = false;
__device__ constexpr int table_at(int i, int lane) { return 512 + lane / 4 * 8 + i * 4; }
#include "packed_tile.cuh"

// Scales for the codes of outputs lane / 4 and 8 below, of inputs from 16 step on.
__device__ inline float2 scales(const PackedTile& tile, int step) {
    return {__uint_as_float(tile.tables[0]), __uint_as_float(tile.tables[1])};
}

#include "e4m3_codes.cuh"
