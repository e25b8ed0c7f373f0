// A packed tile times R rows of x, at most eight, by a warp, for GEMVs: lane 4 g + t has sums of outputs g and g + 8.

constexpr int GROUPS = SPAN / SCALED, STEPS_OF_GROUP = SCALED / 16;  // of a packed tile, with one scale each; of 16 inputs

// A packed tile's inputs of x, as the second operand: from shared memory.
__device__ inline void load_rows(unsigned from, unsigned (&b)[SPAN / 32][4]) {
    if constexpr (BY_RUNS) {
#pragma unroll
        for (int q = 0; q < SPAN / 64; q++) load_runs(b[2 * q], b[2 * q + 1], from + q * 128);
    } else {
#pragma unroll
        for (int p = 0; p < SPAN / 32; p++) ldmatrix(b[p], from + p * 64);
    }
}

// x itself, summed up over each group, which minima are multiplied by.
__device__ __forceinline__ void sum_up(const unsigned (&b)[SPAN / 32][4], float (&whole)[GROUPS][4]) {
    const unsigned one = pack<T>(1, 1), ones[4] = {one, one, one, one};
    if constexpr (MINIMA)
#pragma unroll
        for (int s = 0; s < SPAN / 16; s++)
            mma<T>(whole[s / STEPS_OF_GROUP], ones, b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]);
}

// whole: as sum_up() makes it.
__device__ __forceinline__ void multiply(const PackedTile& tile, const unsigned (&b)[SPAN / 32][4], const float (&whole)[GROUPS][4],
                                         float (&sum)[4]) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float part[4] = {};
#pragma unroll
        for (int s = g * STEPS_OF_GROUP; s < (g + 1) * STEPS_OF_GROUP; s++) {
            unsigned a[4];
            codes<T>(tile, s, a);
            mma<T>(part, a, b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]);
        }
        const float2 by = scales(tile, g * STEPS_OF_GROUP);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i % 2 < R) sum[i] += (i < 2 ? by.x : by.y) * part[i];
        if constexpr (MINIMA) {
            const float2 less = minima(tile, g * STEPS_OF_GROUP);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i % 2 < R) sum[i] -= (i < 2 ? less.x : less.y) * whole[g][i];
        }
    }
}
