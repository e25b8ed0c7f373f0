// q8_0 (llama.cpp's GGUF): codes of 8 bits, and one f16 scale for each 32 inputs of an output.
//
// A packed tile is 16 outputs by 32 inputs, as tensor cores take them from registers: 16 bytes of codes for each of 32
// lanes, then the scales, those of outputs g and g + 8 side by side. Lane 4 g + t has, in word 2 s + h, the codes of
// output g + 8 h and of inputs 16 s + 2 t, + 8, + 1 and + 9: bytes 0 and 2 are neighbours for the tensor cores, and so
// are 1 and 3. A byte is the code plus 128. cuda_layouts.py describes packed tiles.

#include "bytes.cuh"

constexpr int PACKED_BYTES = 544, SPAN = 32, SCALED = 32;  // bytes of a packed tile, its inputs, and those that share a scale
constexpr int SCALE_WORDS = 1;
#include "word_tiles.cuh"

// Scales for the codes of outputs lane / 4 and 8 below, of inputs from 16 step on.
__device__ inline float2 scales(const PackedTile& tile, int step) { return unpack<f16>(tile.scales[0]); }

// Codes of inputs 16 step to 16 step + 15, as the first operand of a matmul.
template <class E> __device__ inline void codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
    centred_bytes<E>(tile.words[2 * step], a[0], a[2]);
    centred_bytes<E>(tile.words[2 * step + 1], a[1], a[3]);
}

// Weights of inputs 16 step to 16 step + 15, rounded once, as the first operand of a matmul.
template <class E> __device__ inline void weights(const PackedTile& tile, int step, unsigned (&a)[4]) {
    const float2 by = scales(tile, step);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned word = tile.words[2 * step + h];
        const float scale = h ? by.y : by.x;
        a[h] = pack<E>(byte_times(word, 0, scale), byte_times(word, 2, scale));
        a[2 + h] = pack<E>(byte_times(word, 1, scale), byte_times(word, 3, scale));
    }
}
