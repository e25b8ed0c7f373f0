// Pieces of several strips times so many of 8 rows of x each, PITCH bytes from row to row; x_from: this lane's row of the
// first 8 and its eight of the first 32 inputs. Codes stay as they are widened the fastest, each more by what offsets()
// tells, and inputs with one scale are added up before they are scaled: the sum of x takes off both offset and minimum.
template <int PITCH, int STRIPS, int TILES>
__device__ inline void multiply_pieces(const Piece (&pieces)[STRIPS], unsigned x_from, float (&sum)[STRIPS][TILES][4]) {
    constexpr int ALONE = (SCALED < SPAN ? SCALED : SPAN) / 16;  // steps of 16 inputs with one scale
    constexpr bool SUMS = RAW || MINIMA;
    unsigned b[SPAN / 32][TILES][4];
#pragma unroll
    for (int p = 0; p < SPAN / 32; p++)
#pragma unroll
        for (int j = 0; j < TILES; j++) ldmatrix(b[p][j], x_from + j * 8 * PITCH + p * 64);
    auto multiply_step = [&](float (&c)[4], const unsigned (&a)[4], int k, int j) {
        mma<T>(c, a, b[k / 2][j][k % 2 * 2], b[k / 2][j][k % 2 * 2 + 1]);
    };
    const unsigned one = pack<T>(1, 1), ones[4] = {one, one, one, one};
#pragma unroll
    for (int begin = 0; begin < SPAN / 16; begin += ALONE) {
        float whole[TILES][4] = {};
        if (SUMS)
#pragma unroll
            for (int k = begin; k < begin + ALONE; k++)
#pragma unroll
                for (int j = 0; j < TILES; j++) multiply_step(whole[j], ones, k, j);
#pragma unroll
        for (int o = 0; o < STRIPS; o++) {
            unsigned a[ALONE][4];
#pragma unroll
            for (int k = 0; k < ALONE; k++) raw_codes<T>(pieces[o], begin + k, a[k]);
            const float2 by = scales(pieces[o], begin), more = offsets<T>(pieces[o], begin);
            float2 less = minima(pieces[o], begin);
            if (RAW) less.x += by.x * more.x, less.y += by.y * more.y;
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                float part[4] = {};
#pragma unroll
                for (int k = 0; k < ALONE; k++)
                    multiply_step(part, a[k], begin + k, j);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[o][j][i] += (i < 2 ? by.x : by.y) * part[i];
                    if (SUMS) sum[o][j][i] -= (i < 2 ? less.x : less.y) * whole[j][i];
                }
            }
        }
    }
}
