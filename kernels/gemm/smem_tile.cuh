// A stage of shared memory by tensor cores: M outputs' weights and ROWS rows of x, KC inputs of each in boxes of 64
// with TMA's 128-byte swizzle. A warp has 16 of the outputs, and the rows as TILES tiles of eight.

struct TileLane {  // a lane's row of a box, and where its first vector of 16 bytes stands there
    unsigned w_from, w_piece, x_from, x_piece;

    __device__ TileLane(unsigned ring, int subtile, int lane)
        : w_from(ring + (subtile * 16 + lane % 16) * 128), w_piece((lane / 16 ^ lane % 8) * 16),
          x_from(ring + (BOXES * M + lane % 8 + (TILES > 1 ? lane / 16 * 8 : 0)) * 128),
          x_piece((lane / 8 % 2 ^ lane % 8) * 16) {}
};

// The k-th 16 inputs of a stage.
template <int N> __device__ inline void multiply_step(float (&sum)[N][4], const TileLane& lane, int stage, int k) {
    const int box = stage * STAGE + k / 4 * M * 128, box_x = stage * STAGE + k / 4 * ROWS * 128;
    unsigned a[4];
    ldmatrix(a, lane.w_from + box + (k % 4 * 32 ^ lane.w_piece));
    if constexpr (N == 1) {
        unsigned b[2];
        ldmatrix(b, lane.x_from + box_x + (k % 4 * 32 ^ lane.x_piece));
        mma<T>(sum[0], a, b[0], b[1]);
    } else {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            unsigned b[4];
            ldmatrix(b, lane.x_from + box_x + j * 1024 + (k % 4 * 32 ^ lane.x_piece));
            mma<T>(sum[j], a, b[0], b[1]);
            mma<T>(sum[j + 1], a, b[2], b[3]);
        }
    }
}
