// What a warp of decode.cu does with a tile of keys and values in shared memory, of which it takes 16 tokens.

constexpr int LOADS = TOKEN_BYTES / 32;                // of 16 tokens by 32 bytes
typedef unsigned Fragments[LOADS][4];                 // keys or values, as ldmatrix loads them
typedef unsigned QueryFragments[DIM / 16][ROWS / 4];  // q as the second operand of matmuls, of each 8 heads two

// Where a piece of 16 bytes of a token's run lies in a tile, in which the runs of a token stand side by side: TMA's
// swizzle changes places of a run's pieces by the number of its 128 bytes, which are 8 / PIECES runs. So 8 tokens'
// pieces lie in different banks where RUNS is odd.
__device__ inline unsigned lies(int token, int run, int piece) {
    const int at = token * RUNS + run;
    return at * RUN_BYTES + (piece ^ at / (8 / PIECES) % PIECES) * 16;
}

__device__ __forceinline__ void load_queries(QueryFragments& queries, const Heads& heads, int lane) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
        ldmatrix(queries[i],
                 smem_address(heads.rotated + (lane / 16 * 8 + lane % 8) % ROWS * WIDE + i * 16 + lane / 8 % 2 * 8));
}

__device__ __forceinline__ void load_keys(Fragments& x, unsigned tile, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8, piece = i * 2 % PIECES + lane / 16;
        ldmatrix(x[i], tile + lies(row, i * 2 / PIECES, piece));
    }
}

__device__ __forceinline__ void load_values(Fragments& x, unsigned tile, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int row = warp * 16 + lane / 16 * 8 + lane % 8, piece = i * 2 % PIECES + lane / 8 % 2;
        ldmatrix_transposed(x[i], tile + lies(row, i * 2 / PIECES, piece));
    }
}

// Values of tokens that do not count become zeros: whatever lies there, a NaN too, stays out.
__device__ __forceinline__ void clear_values(unsigned tile, int first, int last, int warp, int lane) {
    for (int i = lane; i < 16 * PIECES * RUNS; i += 32) {
        const int row = i / PIECES % 16;
        if (row < first || row >= last) zero_smem(tile + lies(warp * 16 + row, i / (16 * PIECES), i % PIECES));
    }
    __syncwarp();
}

// s, which is zero: scores of 8 heads each. Those of 8 alone are summed up by even and by odd i, then both.
__device__ __forceinline__ void compute_scores(float (&s)[2][4], const Fragments& x, const QueryFragments& queries) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        unsigned keys[4];
        keys_operand(keys, x, i);
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++)
            mma<Operand>(s[ROWS == 16 ? h : i % 2], keys, queries[i][2 * h], queries[i][2 * h + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][i] += ROWS == 8 ? s[1][i] : 0;
}

// Adds values times their weights p.
__device__ __forceinline__ void add_values(OnlineSoftmax& softmax, const Fragments& x,
                                           const unsigned (&p)[ROWS / 8][2]) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        unsigned values[4];
        values_operand(values, x, i);
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) mma<Operand>(softmax.o[i][h], values, p[h][0], p[h][1]);
    }
}
