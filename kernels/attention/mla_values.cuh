// The second matmul of mla_decode.cu and mla_decode_e4m3.cu: values by weights. swizzled() is theirs.
//
// Where FP8, codes become f16, whatever T is. ldmatrix moves pairs of bytes, so that an operand has the even columns of 16,
// and another one the odd ones. No element is multiplied by its scale: a token's weight has it.

// Values of 16 heads and this warp's columns: of each 8 of them rows lane / 4 and 8 below, columns lane % 4 * 2 and the next.
// Where FP8, of each 16 columns the even ones are in one 8 and the odd ones in the next.
struct Values {
    float o[COLUMNS / 8][4];

    __device__ void scale(const float* by) {
        const float upper = by[threadIdx.x % 32 / 4], lower = by[threadIdx.x % 32 / 4 + 8];
        if (FP8 && !__any_sync(~0u, upper != 1 || lower != 1)) return;  // instructions are short there, in 16 bits they are not
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            o[n][0] *= upper, o[n][1] *= upper, o[n][2] *= lower, o[n][3] *= lower;
    }
    // weights: 16 heads' of a panel's tokens
    __device__ void add_panel(unsigned weights, unsigned panel) {
        const int row = threadIdx.x % 16;
        unsigned p[4];
        load_weights(p, weights);
        if (FP8)
            add_codes(p, panel + codes_at(0), panel + codes_at(1));
        else
            add_elements(p, panel + threadIdx.x / 32 * COLUMNS * 2, row);
    }
    __device__ static void load_weights(unsigned (&p)[4], unsigned weights) {
        ldmatrix(p, weights + threadIdx.x % 16 * WEIGHTS_ROW + threadIdx.x % 32 / 16 * 16);
    }
    // Where a panel has this lane's row of this warp's columns: of the first 32 or of the others.
    __device__ static int codes_at(int m) {
        return swizzled(threadIdx.x % 16, threadIdx.x / 32 * (COLUMNS / 16) + m * 2 + threadIdx.x % 32 / 16);
    }
    __device__ void add_elements(const unsigned (&p)[4], unsigned panel, int row) {
#pragma unroll
        for (int m = 0; m < COLUMNS / 16; m++) {
            unsigned y[4];
            ldmatrix_transposed(y, panel + swizzled(row, m * 2 + threadIdx.x % 32 / 16));
            mma<Operand>(o[2 * m], p, y[0], y[1]);
            mma<Operand>(o[2 * m + 1], p, y[2], y[3]);
        }
    }
    __device__ void add_codes(const unsigned (&p)[4], unsigned first, unsigned second) {
#pragma unroll
        for (int m = 0; m < COLUMNS / 32; m++) {
            unsigned y[4], even[4], odd[4];
            ldmatrix_transposed(y, m ? second : first);
#pragma unroll
            for (int i = 0; i < 4; i++) f16_pairs(__byte_perm(y[i], 0, 0x3120), even[i], odd[i]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma<Operand>(o[4 * m + 2 * i], p, even[2 * i], even[2 * i + 1]);
                mma<Operand>(o[4 * m + 2 * i + 1], p, odd[2 * i], odd[2 * i + 1]);
            }
        }
    }
    // to: [HEADS, LATENT], of the block's first head; the first `heads` are there.
    __device__ void store(T* to, int heads) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int lane = threadIdx.x % 32, head = lane / 4 + h * 8;
            T* const from = to + head * LATENT + threadIdx.x / 32 * COLUMNS;  // the warp's first column
#pragma unroll
            for (int m = 0; m < COLUMNS / 32; m++) {
                unsigned x[4];
                if (FP8) {  // of 16 columns, and of 16 more, four side by side
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float *even = o[4 * m + i / 2 * 2], *odd = o[4 * m + i / 2 * 2 + 1];
                        x[i] = pack<T>(even[2 * h + i % 2], odd[2 * h + i % 2]);
                    }
                    if (head >= heads) continue;
#pragma unroll
                    for (int i = 0; i < 2; i++) *(uint2*)(from + (2 * m + i) * 16 + lane % 4 * 4) = {x[2 * i], x[2 * i + 1]};
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) x[i] = pack<T>(o[4 * m + i][2 * h], o[4 * m + i][2 * h + 1]);
                    exchange_quads(x);
                    if (head < heads) *(uint4*)(from + (4 * m + lane % 4) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
                }
            }
        }
    }
};
