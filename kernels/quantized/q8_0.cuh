// q8_0 (llama.cpp's GGUF): codes of 8 bits, and one f16 scale for each 32 inputs of an output.
//
// A packed tile is 16 outputs by 32 inputs, as tensor cores take them from registers: 16 bytes of codes for each of 32
// lanes, then the scales, those of outputs g and g + 8 side by side. Lane 4 g + t has, in word 2 s + h, the codes of
// output g + 8 h and of inputs 16 s + 2 t, + 8, + 1 and + 9: bytes 0 and 2 are neighbours for the tensor cores, and so
// are 1 and 3. A byte is the code plus 128. cuda_layouts.py describes packed tiles.

#include "bytes.cuh"

constexpr int PACKED_BYTES = 544, SPAN = 32, SCALED = 32;  // bytes of a packed tile, its inputs, and those that share a scale
constexpr int WORDS = 4, TABLE_WORDS = 1, TOGETHER = 1;
constexpr bool MINIMA = false, BY_RUNS = false, RAW = false;
__device__ constexpr int table_at(int, int lane) { return 512 + lane / 4 * 4; }
#include "packed_tile.cuh"

// Codes of inputs 16 step to 16 step + 15, as the first operand of a matmul.
template <class E> __device__ inline void codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
    centred_bytes<E>(tile.words[2 * step], a[0], a[2]);
    centred_bytes<E>(tile.words[2 * step + 1], a[1], a[3]);
}

#include "f16_scales.cuh"
