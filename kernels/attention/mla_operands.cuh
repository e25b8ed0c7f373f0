// The first matmul of mla_decode.cu: queries by keys.
//
// Where FP8, codes become f16, whatever T is, by one instruction for two (f16_pairs). ldmatrix moves pairs of bytes, so that
// of 16 elements of a key a lane has four neighbours: queries are loaded in the same order. No element is multiplied by its
// scale: scores are by those of keys.

// This warp's steps of 16 heads' queries, as the first operand of matmuls; step j has the elements from j * 64 on and 16
// times the warp's quarter. Heads past the last one are zeros. Where FP8, what the warp has of a head is divided by a power
// of two (query_exponent).
struct Queries {
    unsigned x[STEPS][4];
    float by[2];  // where FP8: what heads lane / 4 and 8 below are divided by

    __device__ Queries(const T* q, int heads) {
        const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32 % QUARTERS;
#pragma unroll
        for (int j = 0; j < STEPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int head = lane / 4 + i % 2 * 8, at = FP8 ? lane % 4 * 4 + i / 2 * 2 : i / 2 * 8 + lane % 4 * 2;
                x[j][i] = head < heads ? *(const unsigned*)(q + head * WIDTH + j * 64 + quarter * 16 + at) : 0;
            }
        if (FP8) divide();
    }
    __device__ void divide() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = 0;
#pragma unroll
            for (int j = 0; j < STEPS; j++)
#pragma unroll
                for (int i = h; i < 4; i += 2) most = fmaxf(most, fmaxf(fabsf(low(x[j][i])), fabsf(high(x[j][i]))));
#pragma unroll
            for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            const int exponent = query_exponent(most);
            const float inverse = inverse_scale(exponent);
            by[h] = scale_of(exponent);
#pragma unroll
            for (int j = 0; j < STEPS; j++)
#pragma unroll
                for (int i = h; i < 4; i += 2) x[j][i] = pack<f16>(low(x[j][i]) * inverse, high(x[j][i]) * inverse);
        }
    }
    __device__ static float low(unsigned pair) { return to_float(T{(unsigned short)pair}); }
    __device__ static float high(unsigned pair) { return to_float(T{(unsigned short)(pair >> 16)}); }
};

// Of a panel's 16 tokens and a warp's quarter of 16 heads' elements: sums of each 8 tokens, as mma() has them.
struct Dots {
    float latent[2][2][4] = {}, rope[2][4] = {};  // of even and odd steps; where FP8 the last step apart, as it has other scales

    __device__ Dots(const Queries& q, unsigned panel) {
        if (FP8)
            of_codes(q, panel);
        else
            of_elements(q, panel);
    }
    __device__ void of_elements(const Queries& q, unsigned panel) {
        const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32 % QUARTERS;
        const unsigned at = panel + swizzled(lane % 8 + lane / 16 * 8, quarter * 2 + lane / 8 % 2);
        unsigned y[4];
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            ldmatrix(y, at + j * 128);
            mma<Operand>(latent[j % 2][0], q.x[j], y[0], y[1]);
            mma<Operand>(latent[j % 2][1], q.x[j], y[2], y[3]);
        }
    }
    __device__ void of_codes(const Queries& q, unsigned panel) {
        const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32 % QUARTERS;
        unsigned y[4];
        const unsigned at = panel + swizzled(lane % 16, quarter), last = at + (STEPS - 1) * 64;
#pragma unroll
        for (int j = 0; j < STEPS; j += 2) {  // two steps at once
            ldmatrix(y, j < STEPS - 1 ? at + (j + lane / 16) * 64 : last);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (j + i / 2 >= STEPS) continue;
                unsigned b[2];
                f16_pairs(y[i], b[0], b[1]);
                mma<Operand>(j < STEPS - 1 ? latent[i / 2][i % 2] : rope[i % 2], q.x[j + i / 2], b[0], b[1]);
            }
        }
    }
    // to: [16, SCORES_ROW], of the panel's first token.
    __device__ void store(const Queries& q, const unsigned char* scales, float* to) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const unsigned char* const exponents = scales + n * 8 + lane % 4 * 2;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float s[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int i = 2 * h + j;
                    s[j] = latent[0][n][i] + latent[1][n][i];
                    if (FP8) s[j] = (s[j] * scale_of(exponents[j]) + rope[n][i] * scale_of(exponents[PANEL + j])) * q.by[h];
                }
                *(float2*)(to + (lane / 4 + h * 8) * SCORES_ROW + n * 8 + lane % 4 * 2) = {s[0], s[1]};
            }
        }
    }
};

// A quarter of the dot products of 16 heads' queries and a panel's 16 tokens, to scores [QUARTERS, ROWS, SCORES_ROW].
__device__ inline void multiply_keys(const Queries& q, unsigned panel, const unsigned char* scales, float* scores) {
    const int warp = threadIdx.x / 32;
    Dots(q, panel).store(q, scales, scores + warp % QUARTERS * ROWS * SCORES_ROW + warp / QUARTERS * PANEL);
}
