// 32 inputs of a packed tile times so many of 8 rows each, by a warp: codes are multiplied exactly, and sums are scaled
// as they are added up. A minimum is multiplied by the sum of x itself, which an mma with ones gives.

constexpr int PARTS = SCALED < 32 ? 2 : 1;  // of 32 inputs, with scales of their own

// x summed up over each part. b: as ldmatrix gives it, of 32 inputs.
template <int TILES>
__device__ inline void sum_up_rows(const unsigned (&b)[TILES][4], float (&whole)[TILES][PARTS][4]) {
    const unsigned one = pack<T>(1, 1), ones[4] = {one, one, one, one};
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int s = 0; s < 2; s++) mma<T>(whole[j][s % PARTS], ones, b[j][2 * s], b[j][2 * s + 1]);
}

// Adds to sum [TILES][4]: outputs lane / 4 and 8 below, rows lane % 4 * 2 and + 1. step: of 16 inputs, the first of
// two.
template <class P, int TILES>
__device__ inline void multiply_tile(const P& tile, int step, const unsigned (&b)[TILES][4],
                                      const float (&whole)[TILES][PARTS][4], float (&sum)[TILES][4]) {
#pragma unroll
    for (int g = 0; g < PARTS; g++) {
        const float2 by = scales(tile, step + g), less = minima(tile, step + g);
        unsigned a[2][4];
        codes<T>(tile, step + g, a[0]);
        if (PARTS == 1) codes<T>(tile, step + 1, a[1]);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            float part[4] = {};
            mma<T>(part, a[0], b[j][2 * g], b[j][2 * g + 1]);
            if (PARTS == 1) mma<T>(part, a[1], b[j][2], b[j][3]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[j][i] += (i < 2 ? by.x : by.y) * part[i];
                if (MINIMA) sum[j][i] -= (i < 2 ? less.x : less.y) * whole[j][g][i];
            }
        }
    }
}
