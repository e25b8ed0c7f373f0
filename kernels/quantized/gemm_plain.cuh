// A chunk of quantized_gemm.cu by one packed tile after the other (tile_mma.cuh).
#include "tile_mma.cuh"

constexpr bool SUMMED = false;  // whether warps sum x up beforehand, in `tables`
constexpr int TABLES = 0;

#if __CUDA_ARCH__ >= 900
__device__ inline void sum_up(unsigned, unsigned char*) {}

// A chunk's packed tiles k, k + GROUPS, ... of MT n-tiles.
__device__ inline void multiply(unsigned x_from, unsigned w_from, unsigned, int group, float (&sum)[MT][TILES][4]) {
    const int lane = threadIdx.x % 32;
    // A lane's row of x, and where its first packed tile of 16 bytes stands there.
    const unsigned x_row = x_from + lane % 8 * 128, x_chunk = (lane / 8 ^ lane % 8) * 16;
#pragma unroll
    for (int i = 0; i < OF_CHUNK; i += GROUPS) {
#pragma unroll
        for (int p = 0; p < SPAN / 32; p++) {
            const int k = i + group, part_of_x = k * (SPAN / 32) + p;  // 32 inputs
            unsigned b[TILES][4];
#pragma unroll
            for (int j = 0; j < TILES; j++)
                ldmatrix(b[j], x_row + (part_of_x / 2 * ROWS + j * 8) * 128 + (part_of_x % 2 * 64 ^ x_chunk));
            float whole[TILES][PARTS][4] = {};
            if (MINIMA) sum_up_rows(b, whole);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const PackedTile tile = load_packed_tile(w_from + (m * OF_CHUNK + k) * PACKED_BYTES, lane, p);
                multiply_tile(tile, 2 * p, b, whole, sum[m]);
            }
        }
    }
}
#endif
