// Results of mma on their way to shared memory.

// A lane's part of N_TILES times 16 outputs of TILES times 8 rows, from `here`, its first, on: PITCH floats an output.
template <int PITCH, int N_TILES, int TILES>
__device__ __forceinline__ void keep_sums(const float (&sum)[N_TILES][TILES][4], float* here) {
#pragma unroll
    for (int s = 0; s < N_TILES; s++)
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) here[(s * 16 + i / 2 * 8) * PITCH + j * 8 + i % 2] = sum[s][j][i];
}
