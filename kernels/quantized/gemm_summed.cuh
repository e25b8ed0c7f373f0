// A chunk of quantized_gemm.cu of super-blocks of 256 inputs with minima for each 32. SUMMERS of warps sum x up over
// these, a chunk each in turn, and leave the sums as others need them: nobody else sums up.
//
// Codes are multiplied as they are widened, more by RAISED: an mma begins with what that makes too much. Minima of a unit
// of pieces are whole numbers, and one mma multiplies them by the sums of x, in terms of 16 bits; a factor they share. A
// warp's units are UNIT pieces long, of one super-block.

constexpr bool SUMMED = true;
constexpr int UNIT = OF_CHUNK / GROUPS < 4 ? OF_CHUNK / GROUPS : 4, UNITS = OF_CHUNK / UNIT;  // pieces; of a chunk
constexpr int OF_UNIT = 2 * UNIT, OF_X = KC / 32;  // groups: of a unit; of a chunk of x
constexpr int TERMS = 16 / OF_UNIT;                // of a sum, that an mma of 16 inputs has room for
constexpr int BEGINS = TILES * OF_X * 64, TABLES = BEGINS + TILES * UNITS * 256;  // bytes: of what an mma begins with
static_assert(GROUP == 32 && SUPER == SPAN && MINIMA && OF_CHUNK % GROUPS == 0);

// Sums of x in 16 bits are of this, so that f16 holds them.
__device__ constexpr float part_of_sum(bf16) { return 1; }
__device__ constexpr float part_of_sum(f16) { return 1.0f / 64; }

#if __CUDA_ARCH__ >= 900
// By a warp: sums of a chunk of x over groups, by mma with x as the first operand: a column of the second has ones for the
// inputs of one group. tables: of each 8 rows and group four times 16 bytes, with which a lane's mma begins; then of each 8
// rows and unit 8 bytes for each lane, the sums as the second operand.
__device__ inline void sum_up(unsigned x_from, unsigned char* tables) {
    constexpr int BOTH = TILES > 1 ? 2 : 1;  // tiles of 8 rows at once
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned one = pack<T>(1, 1);
#pragma unroll 1
    for (int j = 0; j < TILES; j += BOTH)
#pragma unroll 1
        for (int first = 0; first < OF_X; first += 8) {
            float sum[2][4] = {};  // of rows g and 8 below, of groups 2 t and + 1; half of the inputs each
            // A lane's row of x: with two tiles every other eight of them is the second's.
            const unsigned row = x_from + ((first / 2) * ROWS + j * 8 + (BOTH - 1) * (lane / 8 % 2 * 8) + lane % 8) * 128;
#pragma unroll
            for (int i = 0; i < 8 && i < OF_X; i++) {
                const unsigned only = g == i ? one : 0, at = row + i / 2 * ROWS * 128;
                unsigned a[4];
                if constexpr (BOTH > 1) {
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
            const int group = first + 2 * t;
            if (group >= OF_X) continue;
#pragma unroll
            for (int h = 0; h < BOTH; h++) {
                float rest[2] = {sum[0][2 * h] + sum[1][2 * h], sum[0][2 * h + 1] + sum[1][2 * h + 1]};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float* const to = (float*)(tables + (((j + h) * OF_X + group + i) * 4 + g / 2) * 16) + g % 2;
                    to[0] = to[2] = -RAISED<T> * rest[i];
                    rest[i] *= part_of_sum(T());
                }
                unsigned char* const unit = tables + BEGINS + ((j + h) * UNITS + group / OF_UNIT) * 256 + g * 32;
#pragma unroll
                for (int term = 0; term < TERMS; term++) {
                    const unsigned pair = pack<T>(rest[0], rest[1]);
                    const int input = term * OF_UNIT + group % OF_UNIT;
                    rest[0] -= unpack<T>(pair).x, rest[1] -= unpack<T>(pair).y;
                    *(unsigned*)(unit + input % 8 / 2 * 8 + input / 8 * 4) = pair;
                }
            }
        }
}

// Minima of a unit times x, taken from sum. from: the unit's first piece; sums: of the unit and the lane.
__device__ inline void subtract_minima(unsigned from, unsigned sums, float (&sum)[TILES][4]) {
    const int lane = threadIdx.x % 32;
    const unsigned at = from + lane % UNIT * PIECE + lane / 4 * 4;  // of two groups in order of the mma's inputs
    const unsigned first = load_shared4(at + NUMBERS_AT), second = load_shared4(at + NUMBERS_AT + 32);
    const float2 factors = unpack<f16>(load_shared4(from + FACTORS_AT + 32 + lane / 4 * 4));
    unsigned a[4];
    centred_bytes<T>(__byte_perm(first, second, 0x7632), a[0], a[1]);
    a[2] = a[0], a[3] = a[1];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        const unsigned words = sums + j * UNITS * 256;
        float less[4] = {};
        mma<T>(less, a, load_shared4(words), load_shared4(words + 4));
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] -= (i < 2 ? factors.x : factors.y) / part_of_sum(T()) * less[i];
    }
}

// The codes of a piece, as lanes have them, and words of its scales and minima: of two groups.
struct Codes {
    unsigned words[WORDS], numbers[2];
};
__device__ inline Codes shared_codes(unsigned from) {
    const int lane = threadIdx.x % 32;
    Codes y;
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
        const uint4 x = load_shared16(from + i * 512 + lane * 16);
        y.words[4 * i] = x.x, y.words[4 * i + 1] = x.y, y.words[4 * i + 2] = x.z, y.words[4 * i + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) y.numbers[i] = load_shared4(from + NUMBERS_AT + i * 32 + lane / 4 * 4);
    return y;
}

// A chunk's units k, k + GROUPS, ... of MT strips.
__device__ inline void multiply(unsigned x_from, unsigned w_from, unsigned tables, int group, float (&sum)[MT][TILES][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < UNITS; u += GROUPS) {
        const int unit = u + group;
        const unsigned from = w_from + unit * UNIT * PIECE, begins = tables + unit * OF_UNIT * 64 + lane % 4 * 16;
        // A lane's row of x, and there its 16 bytes of even groups and of odd ones.
        const unsigned row = x_from + (unit * UNIT * ROWS + lane % 8) * 128, eight = (lane / 8 ^ lane % 8) * 16;
        const unsigned even = row + eight, odd = row + (64 ^ eight);
        float2 factors[MT];
        Codes pieces[MT];
#pragma unroll
        for (int m = 0; m < MT; m++)
            factors[m] = unpack<f16>(load_shared4(from + m * OF_CHUNK * PIECE + FACTORS_AT + lane / 4 * 4));
#pragma unroll
        for (int p = 0; p < OF_UNIT; p++) {
            unsigned b[TILES][4];
            float begin[TILES][4];
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                ldmatrix(b[j], (p % 2 ? odd : even) + (p / 2 * ROWS + j * 8) * 128);
                const uint4 of = load_shared16(begins + (j * OF_X + p) * 64);
                begin[j][0] = __uint_as_float(of.x), begin[j][1] = __uint_as_float(of.y);
                begin[j][2] = __uint_as_float(of.z), begin[j][3] = __uint_as_float(of.w);
            }
#pragma unroll
            for (int m = 0; m < MT; m++) {
                if (p % 2 == 0) pieces[m] = shared_codes(from + (m * OF_CHUNK + p / 2) * PIECE);
                const unsigned numbers = pieces[m].numbers[p % 2];
                const float by[2] = {byte_times(numbers, 0, factors[m].x), byte_times(numbers, 1, factors[m].y)};
                unsigned a[2][4];
#pragma unroll
                for (int s = 0; s < 2; s++) raised_codes<T>(pieces[m].words, p % 2 * 2 + s, a[s]);
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    float part[4] = {begin[j][0], begin[j][1], begin[j][2], begin[j][3]};
                    mma<T>(part, a[0], b[j][0], b[j][1]);
                    mma<T>(part, a[1], b[j][2], b[j][3]);
#pragma unroll
                    for (int i = 0; i < 4; i++) sum[m][j][i] += by[i / 2] * part[i];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
            subtract_minima(from + m * OF_CHUNK * PIECE, tables + BEGINS + (unit * 32 + lane) * 8, sum[m]);
    }
}
#endif
