// Packed tiles of several n-tiles times 8 rows of x, PITCH bytes from row to row; x_from: this lane's row and its eight
// of the first 32 inputs. Codes stay as they are widened the fastest, each more by what offsets()
// tells, and inputs with one scale are added up before they are scaled: the sum of x takes off both offset and minimum.
// LATER: what multiply_together() does.
template <int PITCH, bool LATER, int N_TILES>
__device__ inline void multiply_tiles(const PackedTile (&tiles)[N_TILES], unsigned x_from, float (&sum)[N_TILES][4]) {
    constexpr int ALONE = (SCALED < SPAN ? SCALED : SPAN) / 16;  // steps of 16 inputs with one scale
    constexpr bool SUMS = !LATER && (RAW || MINIMA);
    unsigned b[SPAN / 32][4];
#pragma unroll
    for (int p = 0; p < SPAN / 32; p++) ldmatrix(b[p], x_from + p * 64);
    auto multiply_step = [&](float (&c)[4], const unsigned (&a)[4], int k) {
        mma<T>(c, a, b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]);
    };
    const unsigned one = pack<T>(1, 1), ones[4] = {one, one, one, one};
#pragma unroll
    for (int begin = 0; begin < SPAN / 16; begin += ALONE) {
        float whole[4] = {};
        if (SUMS)
#pragma unroll
            for (int k = begin; k < begin + ALONE; k++) multiply_step(whole, ones, k);
#pragma unroll
        for (int o = 0; o < N_TILES; o++) {
            unsigned a[ALONE][4];
#pragma unroll
            for (int k = 0; k < ALONE; k++) raw_codes<T>(tiles[o], begin + k, a[k]);
            const float2 by = scales(tiles[o], begin), more = offsets<T>(tiles[o], begin);
            float2 less = minima(tiles[o], begin);
            if (RAW) less.x += by.x * more.x, less.y += by.y * more.y;
            float part[4] = {};
#pragma unroll
            for (int k = 0; k < ALONE; k++) multiply_step(part, a[k], begin + k);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[o][i] += (i < 2 ? by.x : by.y) * part[i];
                if (SUMS) sum[o][i] -= (i < 2 ? less.x : less.y) * whole[i];
            }
        }
    }
}

// A sum of 32 of x as two elements: so many times the first one, and the second. An f16 holds no more than 65504.
__device__ constexpr float times_first(bf16) { return 1; }
__device__ constexpr float times_first(f16) { return 32; }
__device__ inline unsigned for_first(bf16, unsigned pair) { return pair; }
__device__ inline unsigned for_first(f16, unsigned pair) { return mul2<f16>(pair, 0x50005000); }  // 32 twice

// TOGETHER packed tiles of two n-tiles, N_TILE_BYTES bytes apart, whose minima have one factor, and their scales another:
// those times the sums of x are a product of matrices, too, of numbers of 8 bits and of 8 sums as two elements each, so
// that they have twice the digits. sums_at: those of these packed tiles, 256 bytes that sum_up_inputs() makes.
template <int PITCH, int N_TILE_BYTES, class P>
__device__ inline void multiply_together(P, unsigned from, unsigned x_from, unsigned sums_at, float (&sum)[2][4]) {
    const int lane = threadIdx.x % 32;
    const auto first = shared_super(P(), from, lane), second = shared_super(P(), from + N_TILE_BYTES, lane);
#pragma unroll
    for (int k = 0; k < TOGETHER; k++) {
        const P tiles[2] = {load_packed_tile(from + k * PACKED_BYTES, lane, first),
                            load_packed_tile(from + N_TILE_BYTES + k * PACKED_BYTES, lane, second)};
        multiply_tiles<PITCH, true>(tiles, x_from + k * SPAN * 2, sum);
    }
    const uint2 b = load_shared8(sums_at + lane * 8);
#pragma unroll
    for (int o = 0; o < 2; o++) {
        const auto& of = o ? second : first;
        const unsigned scales[4] = {for_first(T(), of.scales[0]), for_first(T(), of.scales[1]), of.scales[0], of.scales[1]};
        const unsigned minima[4] = {for_first(T(), of.minima[0]), for_first(T(), of.minima[1]), of.minima[0], of.minima[1]};
        float scaled[4] = {}, less[4] = {};
        mma<T>(scaled, scales, b.x, b.y);
        mma<T>(less, minima, b.x, b.y);
        const float2 factors = unpack<f16>(of.factors[0]), of_minima = unpack<f16>(of.factors[1]);
        const float offset = offsets<T>(P(), 0).x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[o][i] -= (i < 2 ? factors.x : factors.y) * offset * scaled[i];
            sum[o][i] -= (i < 2 ? of_minima.x : of_minima.y) * less[i];
        }
    }
}

// Sums, by a warp, of each 32 of x [8, INPUTS] as multiply_together() takes them: for each 256 inputs, and for each row
// and two of the sums, these and then what the elements lack.
template <int PITCH, int INPUTS> __device__ inline void sum_up_inputs(unsigned x_from, T* to) {
    const int lane = threadIdx.x % 32, group = lane / 4;
    const unsigned one = pack<T>(1, 1), ones[4] = {one, one, one, one}, from = x_from + lane % 8 * PITCH + lane / 8 * 16;
#pragma unroll 1
    for (int n = 0; n < INPUTS / 256; n++) {
        float mine[2];  // sums of rows lane % 4 * 2 and + 1
#pragma unroll
        for (int g = 0; g < 8; g++) {
            unsigned b[4];
            ldmatrix(b, from + n * 512 + g * 64);
            float sum[4] = {};
            mma<T>(sum, ones, b[0], b[1]);
            mma<T>(sum, ones, b[2], b[3]);
            if (g == group) mine[0] = sum[0], mine[1] = sum[1];
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            T* const at = to + n * 128 + (lane % 4 * 2 + r) * 16 + group / 2 * 4 + group % 2;
            at[0] = from_float<T>(mine[r] / times_first(T()));
            at[2] = from_float<T>(mine[r] - times_first(T()) * to_float(at[0]));
        }
    }
}
