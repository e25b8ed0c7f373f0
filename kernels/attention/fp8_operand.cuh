// Between what decode.cu loads from shared memory and the first operand of its matmuls.
//
// Where FP8, codes become f16 by one instruction for two, whatever T is: f16 has every code. ldmatrix moves pairs of bytes, so
// that an operand of 16 elements comes in an order of its own. Keys, tokens by elements: of each four neighbours the first
// two in one half of the 16 and the others in the other, which q_prep.cuh does to queries, too. Values, elements by tokens:
// row r has element 2 r, row 8 + r the next one, which online_softmax.cuh undoes.

// Of a lane's two tokens of a warp's 16: lane / 4 and 8 below. No element is multiplied by its scale: scores are by those of
// keys; those of values are added to scores as logarithms, so that a token's weight has its scale in it (OnlineSoftmax).
struct TileScales {
    float keys[2], logs[2], inverses[2];  // scales of keys; of values their logarithms to the base 2, and inverses

    // from: of the tile; token: the first of the 16, of which those from `first` to `last` count.
    __device__ TileScales(const unsigned char* from, int token, int first, int last) {
#pragma unroll
        for (int h = 0; FP8 && h < 2; h++) {
            const int i = h * 8 + threadIdx.x % 32 / 4, at = token + i;
            const unsigned char* const exponents = from + at / BOX * 2 * BOX + at % BOX;
            const bool counts = i >= first && i < last;
            const int of_value = counts ? exponents[BOX] : 127;
            keys[h] = counts ? scale_of(exponents[0]) : 1, logs[h] = of_value - 127, inverses[h] = inverse_scale(of_value);
        }
    }
};

// 16 tokens by elements 16 i to 16 i + 15, of what ldmatrix has loaded.
template <int N> __device__ inline void keys_operand(unsigned (&a)[4], const unsigned (&x)[N][4], int i) {
    if constexpr (FP8) {
#pragma unroll
        for (int h = 0; h < 2; h++) f16_pairs(x[i / 2][i % 2 * 2 + h], a[h], a[2 + h]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = x[i][j];
    }
}

// Elements 16 i to 16 i + 15 by 16 tokens, of what ldmatrix_transposed has loaded.
template <int N> __device__ inline void values_operand(unsigned (&a)[4], const unsigned (&x)[N][4], int i) {
    if constexpr (FP8) {
#pragma unroll
        for (int h = 0; h < 2; h++)  // an element of both tokens, then the next one's
            f16_pairs(__byte_perm(x[i / 2][i % 2 + 2 * h], 0, 0x3120), a[2 * h], a[2 * h + 1]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = x[i][j];
    }
}
