// Between what decode.cu loads from shared memory and the first operand of its matmuls.
//
// ldmatrix moves pairs of bytes. Where FP8 that is two neighbouring codes, so that an operand of 16 elements comes in an
// order of its own. Keys, tokens by elements: the even elements first, which q_prep.cuh does to queries, too. Values,
// elements by tokens: row r has element 2 r, row 8 + r the next one, which online_softmax.cuh undoes.

// The codes of bytes 0 and 2 as elements of E, times `by`: a scale, and what makes up for the other bias.
template <class E> __device__ inline unsigned element_pair(unsigned word, unsigned by);
template <> __device__ inline unsigned element_pair<f16>(unsigned word, unsigned by) {
    return multiply_pairs<f16>((word & 0x00800080) << 8 | (word & 0x007f007f) << 7, by);
}
template <> __device__ inline unsigned element_pair<bf16>(unsigned word, unsigned by) {
    return multiply_pairs<bf16>((word & 0x00800080) << 8 | (word & 0x007f007f) << 4, by);
}

// The bits of a scale's 2^8 or 2^120 fold.
template <class E> __device__ inline unsigned scale_bits(unsigned exponent);
template <> __device__ inline unsigned scale_bits<f16>(unsigned exponent) { return (exponent - 104) << 10; }
template <> __device__ inline unsigned scale_bits<bf16>(unsigned exponent) { return (exponent + 120) << 7; }

// Of a warp's 16 tokens, what this lane needs.
struct TileScales {
    unsigned keys[2], values[2];  // pairs: of tokens lane / 4 and 8 below; of the two from lane % 4 * 2 on and 8 below

    // from: of the tile; token: the first of the 16, of which those from `first` to `last` count. The others are 0.
    __device__ TileScales(const unsigned char* from, int token, int first, int last) {
        if (!FP8) return;
        const int lane = threadIdx.x % 32;
        auto scale = [&](int i, int part) -> unsigned {
            const int at = token + i;
            return i >= first && i < last ? scale_bits<T>(from[(at / BOX * 2 + part) * BOX + at % BOX]) : 0;
        };
#pragma unroll
        for (int h = 0; h < 2; h++) {
            keys[h] = scale(h * 8 + lane / 4, 0) * 0x10001;
            values[h] = scale(h * 8 + lane % 4 * 2, 1) | scale(h * 8 + lane % 4 * 2 + 1, 1) << 16;
        }
    }

    // 16 tokens by elements 16 i to 16 i + 15, of what ldmatrix has loaded.
    template <int N> __device__ void keys_operand(unsigned (&a)[4], const unsigned (&x)[N][4], int i) const {
        if constexpr (FP8) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const unsigned word = x[i / 2][i % 2 * 2 + h];
                a[h] = element_pair<T>(word, keys[h]), a[2 + h] = element_pair<T>(word >> 8, keys[h]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = x[i][j];
        }
    }

    // Elements 16 i to 16 i + 15 by 16 tokens, of what ldmatrix_transposed has loaded.
    template <int N> __device__ void values_operand(unsigned (&a)[4], const unsigned (&x)[N][4], int i) const {
        if constexpr (FP8) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const unsigned word = x[i / 2][i % 2 + 2 * h];
                a[2 * h] = element_pair<T>(word, values[h]), a[2 * h + 1] = element_pair<T>(word >> 8, values[h]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = x[i][j];
        }
    }
};
