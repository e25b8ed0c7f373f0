// Scales in f16, the first of a format's tables: a word has those of outputs g and g + 8 for SCALED inputs.

// Scales for the codes of outputs lane / 4 and 8 below, of inputs from 16 step on.
__device__ inline float2 scales(const PackedTile& tile, int step) { return unpack<f16>(tile.tables[step * 16 / SCALED]); }

// Weights, rounded once, by fewer instructions than other scales take.
__device__ inline void weights_of(f16, const PackedTile& tile, int step, unsigned (&a)[4]) {
    codes<f16>(tile, step, a);
    const unsigned both = tile.tables[step * 16 / SCALED];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = mul2<f16>(a[i], __byte_perm(both, 0, i % 2 ? 0x3232 : 0x1010));
}

#include "packed_weights.cuh"
