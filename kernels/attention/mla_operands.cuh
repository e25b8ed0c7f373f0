// What mla_decode.cu multiplies: queries by keys, and weights by values.

// This warp's steps of 16 heads' queries, as the first operand of matmuls; step j has the elements from j * 64 on and 16
// times the warp's quarter. Heads past the last one are zeros.
__device__ inline void load_queries(unsigned (&x)[STEPS][4], const T* q, int heads) {
    const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32 % QUARTERS;
#pragma unroll
    for (int j = 0; j < STEPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = lane / 4 + i % 2 * 8;
            const T* from = q + head * WIDTH + j * 64 + quarter * 16 + i / 2 * 8 + lane % 4 * 2;
            x[j][i] = head < heads ? *(const unsigned*)from : 0;
        }
}

// A quarter of the dot products of 16 heads' queries and a panel's 16 tokens, to scores [QUARTERS, ROWS, SCORES_ROW].
__device__ inline void multiply_keys(const unsigned (&x)[STEPS][4], unsigned panel, float* scores) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = warp % QUARTERS;
    const unsigned at = panel + swizzled(lane % 8 + lane / 16 * 8, quarter * 2 + lane / 8 % 2);
    float s[2][2][4] = {};  // of even and odd steps, of 8 tokens each
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        unsigned y[4];
        ldmatrix(y, at + j * 128);
        mma<T>(s[j % 2][0], x[j], y[0], y[1]);
        mma<T>(s[j % 2][1], x[j], y[2], y[3]);
    }
    float* to = scores + (quarter * ROWS + lane / 4) * SCORES_ROW + warp / QUARTERS * PANEL + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *(float2*)(to + h * 8 * SCORES_ROW + n * 8) = {s[0][n][2 * h] + s[1][n][2 * h],
                                                           s[0][n][2 * h + 1] + s[1][n][2 * h + 1]};
}

// Values of 16 heads and this warp's columns: of each 8 of them rows lane / 4 and 8 below, columns lane % 4 * 2 and the next.
struct Values {
    float o[COLUMNS / 8][4];

    __device__ void scale(const float* by) {
        const float upper = by[threadIdx.x % 32 / 4], lower = by[threadIdx.x % 32 / 4 + 8];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            o[n][0] *= upper, o[n][1] *= upper, o[n][2] *= lower, o[n][3] *= lower;
    }
    __device__ void add_panel(unsigned weights, unsigned panel) {  // weights: 16 heads' of its tokens
        const int lane = threadIdx.x % 32, row = lane % 16;
        unsigned p[4];
        ldmatrix(p, weights + row * WEIGHTS_ROW + lane / 16 * 16);
#pragma unroll
        for (int m = 0; m < COLUMNS / 16; m++) {
            unsigned y[4];
            ldmatrix_transposed(y, panel + threadIdx.x / 32 * COLUMNS * 2 + swizzled(row, m * 2 + lane / 16));
            mma<T>(o[2 * m], p, y[0], y[1]);
            mma<T>(o[2 * m + 1], p, y[2], y[3]);
        }
    }
    // to: [HEADS, LATENT], of the block's first head; the first `heads` are there.
    __device__ void store(T* to, int heads) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < COLUMNS / 32; m++) {
                unsigned x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = pack<T>(o[4 * m + i][2 * h], o[4 * m + i][2 * h + 1]);
                exchange_quads(x);
                const int head = lane / 4 + h * 8, column = threadIdx.x / 32 * COLUMNS + (4 * m + lane % 4) * 8;
                if (head < heads) *(uint4*)(to + head * LATENT + column) = make_uint4(x[0], x[1], x[2], x[3]);
            }
    }
};
