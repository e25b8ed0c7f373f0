// A chunk of quantized_gemm.cu that is a super-block of 256 inputs with minima for each 32, of up to 16 rows. SUMMERS
// of warps sum x up over these, a chunk each in turn, and leave the sums as others need them: no other warp sums up.
//
// Codes are multiplied as they are widened, more by RAISED: an mma begins with what that makes too much. Minima of a
// n-tile are whole numbers, and one mma multiplies them by the sums of x, in two terms of 16 bits; a factor they share.

constexpr bool SUMMED = true;
constexpr int OF_X = 8;  // groups of a chunk
constexpr int BEGINS = TILES * OF_X * 64, TABLES = BEGINS + TILES * 256;  // bytes: of what an mma begins with
static_assert(GROUP == 32 && FACTORED == KC && MINIMA && OF_CHUNK == 4 && GROUPS == 1 && MT == 1 && TILES <= 2);

// Sums of x in 16 bits are of this, so that f16 holds them.
__device__ constexpr float part_of_sum(bf16) { return 1; }
__device__ constexpr float part_of_sum(f16) { return 1.0f / 64; }

#if __CUDA_ARCH__ >= 900
// Sums of a chunk of x over groups, by a warp, by mma with x as the first operand: a column of the second has ones for
// the inputs of one group. tables: of each 8 rows and group four times 16 bytes, with which a lane's mma begins; then
// of each 8 rows 8 bytes for each lane, the sums as the second operand.
__device__ inline void sum_up(unsigned x_from, unsigned char* tables) {
    const int lane = threadIdx.x % 32, g = lane / 4, group = lane % 4 * 2;
    const unsigned one = pack<T>(1, 1);
    float sum[2][4] = {};  // of rows g and 8 below, of the group and the next; half of the inputs each
    // A lane's row of x: with two tiles every other eight of them is the second's.
    const unsigned row = x_from + ((TILES - 1) * (lane / 8 % 2 * 8) + lane % 8) * 128;
#pragma unroll
    for (int i = 0; i < OF_X; i++) {
        const unsigned only = g == i ? one : 0, at = row + i / 2 * ROWS * 128;
        unsigned a[4];
        if constexpr (TILES > 1) {
#pragma unroll
            for (int s = 0; s < 2; s++) {
                ldmatrix(a, at + ((i % 2 * 4 + s * 2 + lane / 16) ^ lane % 8) * 16);
                mma<T>(sum[s], a, only, only);
            }
        } else {
            ldmatrix(a, at + ((i % 2 * 4 + lane / 8) ^ lane % 8) * 16);
            const unsigned low[4] = {a[0], 0, a[1], 0}, high[4] = {a[2], 0, a[3], 0};
            mma<T>(sum[0], low, only, only);
            mma<T>(sum[1], high, only, only);
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        float rest[2] = {sum[0][2 * j] + sum[1][2 * j], sum[0][2 * j + 1] + sum[1][2 * j + 1]};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float* const to = (float*)(tables + ((j * OF_X + group + i) * 4 + g / 2) * 16) + g % 2;
            to[0] = to[2] = -RAISED<T> * rest[i];
            rest[i] *= part_of_sum(T());
        }
        unsigned* const terms = (unsigned*)(tables + BEGINS + j * 256 + g * 32 + group / 2 * 8);
#pragma unroll
        for (int term = 0; term < 2; term++) {
            const unsigned pair = terms[term] = pack<T>(rest[0], rest[1]);
            rest[0] -= unpack<T>(pair).x, rest[1] -= unpack<T>(pair).y;
        }
    }
}

// Minima of an n-tile's chunk times x, taken from sum. from: the n-tile's first packed tile; sums: of the lane.
__device__ inline void subtract_minima(unsigned from, unsigned sums, float (&sum)[TILES][4]) {
    const int lane = threadIdx.x % 32;
    const unsigned at = from + lane % 4 * PACKED_BYTES + lane / 4 * 4;  // of two groups in order of the mma's inputs
    const unsigned first = load_shared4(at + NUMBERS_AT), second = load_shared4(at + NUMBERS_AT + 32);
    const float2 factors = unpack<f16>(load_shared4(from + FACTORS_AT + 32 + lane / 4 * 4));
    unsigned a[4];
    centred_bytes<T>(__byte_perm(first, second, 0x7632), a[0], a[1]);
    a[2] = a[0], a[3] = a[1];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        float less[4] = {};
        mma<T>(less, a, load_shared4(sums + j * 256), load_shared4(sums + j * 256 + 4));
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] -= (i < 2 ? factors.x : factors.y) / part_of_sum(T()) * less[i];
    }
}

// A chunk of an n-tile.
__device__ inline void multiply(unsigned x_from, unsigned w_from, unsigned tables, int, float (&sum)[MT][TILES][4]) {
    const int lane = threadIdx.x % 32;
    // A lane's row of x, and there its 16 bytes of even groups and of odd ones.
    const unsigned row = x_from + lane % 8 * 128, eight = (lane / 8 ^ lane % 8) * 16;
    const unsigned even = row + eight, odd = row + (64 ^ eight), begins = tables + lane % 4 * 16;
    const float2 factors = unpack<f16>(load_shared4(w_from + FACTORS_AT + lane / 4 * 4));
#pragma unroll
    for (int k = 0; k < OF_CHUNK; k++) {
        const unsigned from = w_from + k * PACKED_BYTES;
        unsigned words[WORDS];
        read_words(Shared{from}, lane, words);
#pragma unroll
        for (int p = 0; p < 2; p++) {  // a group
            const unsigned numbers = load_shared4(from + NUMBERS_AT + p * 32 + lane / 4 * 4);
            const float by[2] = {byte_times(numbers, 0, factors.x), byte_times(numbers, 1, factors.y)};
            unsigned a[2][4];
#pragma unroll
            for (int s = 0; s < 2; s++) raised_codes<T>(words, p * 2 + s, a[s]);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                unsigned b[4];
                ldmatrix(b, (p ? odd : even) + (k * ROWS + j * 8) * 128);
                const uint4 of = load_shared16(begins + (j * OF_X + 2 * k + p) * 64);
                float part[4] = {__uint_as_float(of.x), __uint_as_float(of.y), __uint_as_float(of.z),
                                 __uint_as_float(of.w)};
                mma<T>(part, a[0], b[0], b[1]);
                mma<T>(part, a[1], b[2], b[3]);
#pragma unroll
                for (int i = 0; i < 4; i++) sum[0][j][i] += by[i / 2] * part[i];
            }
        }
    }
    subtract_minima(w_from, tables + BEGINS + lane * 8, sum[0]);
}
#endif
