// How mla_decode_e4m3.cu copies a tile's codes, and multiplies queries by them.

// What the first warps ask TMA for: each a panel of each tile, and its scales. `full` has an arrival of each of them, `empty`
// of all warps.
struct Copies {
    const TensorMap* cache;
    const unsigned char* scales;
    const int* table;
    Barrier *full, *empty;  // [STAGES]
    unsigned ring;          // STAGES tiles, and as many tiles' scales behind them: of a panel those of latents, then the rest's
    int start, stop;
    int slots;  // of the 32 tiles from a multiple of 32 on: a lane has its tile's panel's

    __device__ static int panel() { return threadIdx.x / 32; }
    __device__ static bool asks() { return panel() < PANELS; }
    __device__ void begin() { slots = find(0); }
    // Past the first-level cache, where another step may have left tables: grid_wait() has not been passed.
    __device__ int find(int tile) const {
        const int token = start + (tile + threadIdx.x % 32) * TILE + panel() * PANEL;
        return token < stop ? __ldcg(table + token / SIZE) * SIZE + token % SIZE : -1;
    }
    // To be called once for each tile, one after the other.
    __device__ void ask(int tile) {
        if (!asks()) return;
        if (tile % 32 == 0 && tile) slots = find(tile);
        const int slot = __shfl_sync(~0u, slots, tile % 32), stage = tile % STAGES;
        if (!elected()) return;
        if (tile >= STAGES) mbarrier_wait(empty + stage, tile / STAGES - 1);
        Barrier* const barrier = full + stage;
        const unsigned to = ring + stage * TILE_BYTES + panel() * PANEL_BYTES;
        if (slot < 0) {
            mbarrier_arrive(barrier);
            return;
        }
        mbarrier_expect(barrier, PANEL_BYTES + 2 * PANEL);
#pragma unroll
        for (int i = 0; i < PANEL_BYTES / BOX_BYTES; i++) tma_load(to + i * BOX_BYTES, cache, i * 64, slot, barrier);
        const unsigned there = ring + STAGES * TILE_BYTES + stage * SCALE_BYTES + panel() * 2 * PANEL;
        const unsigned char* const from = scales + slot / SIZE * 2 * (long long)SIZE + slot % SIZE;
        bulk_load(there, from, SIZE == PANEL ? 2 * PANEL : PANEL, barrier);
        if (SIZE != PANEL) bulk_load(there + PANEL, from + SIZE, PANEL, barrier);
    }
    // As many tiles as are held: the panel that the newest token is in, or all others.
    __device__ void ask_first(int tiles, int newest, bool of_newest) {
        for (int t = 0; t < STAGES && t < tiles; t++)
            if ((newest == t * PANELS + panel()) == of_newest) ask(t);
    }
};

// This warp's steps of 16 heads' queries, as the first operand of matmuls: step j of the latent has the elements from j * 64
// on and 16 times the warp's quarter. ldmatrix moves pairs of bytes, so that of 16 elements of a key a lane has four
// neighbours: so it has here. Heads past the last one are zeros. Each head is divided by a power of two (query_exponent).
struct Queries {
    unsigned latent[STEPS][4], rope[ROPE_STEPS][4];

    // tops: [QUARTERS, ROWS], of each head's numbers.
    __device__ Queries(const T* q, int heads, float* tops) {
        const int quarter = threadIdx.x / 32 % QUARTERS;
#pragma unroll
        for (int j = 0; j < STEPS; j++) load(latent[j], q + j * 64 + quarter * 16, heads);
#pragma unroll
        for (int j = 0; j < ROPE_STEPS; j++) load(rope[j], q + LATENT + j * 16, heads);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = 0;
#pragma unroll
            for (int j = 0; j < STEPS; j++) top = fmaxf(top, largest(latent[j], h));
#pragma unroll
            for (int j = 0; j < ROPE_STEPS; j++) top = fmaxf(top, largest(rope[j], h));
#pragma unroll
            for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            if (lane % 4 == 0) tops[quarter * ROWS + lane / 4 + h * 8] = top;  // two warps have the same
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float by = inverse_scale(query_exponent(most(tops, lane / 4 + h * 8)));
#pragma unroll
            for (int j = 0; j < STEPS; j++) divide(latent[j], h, by);
#pragma unroll
            for (int j = 0; j < ROPE_STEPS; j++) divide(rope[j], h, by);
        }
    }
    __device__ static float most(const float* tops, int head) {
        float top = tops[head];
#pragma unroll
        for (int i = 1; i < QUARTERS; i++) top = fmaxf(top, tops[i * ROWS + head]);
        return top;
    }
    __device__ static void load(unsigned (&x)[4], const T* from, int heads) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = lane / 4 + i % 2 * 8;
            x[i] = head < heads ? *(const unsigned*)(from + head * WIDTH + lane % 4 * 4 + i / 2 * 2) : 0;
        }
    }
    __device__ static float largest(const unsigned (&x)[4], int h) {
        const float2 a = unpack<T>(x[h]), b = unpack<T>(x[h + 2]);
        return fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)));
    }
    __device__ static void divide(unsigned (&x)[4], int h, float by) {
#pragma unroll
        for (int i = h; i < 4; i += 2) {
            const float2 a = unpack<T>(x[i]);
            x[i] = pack<Operand>(a.x * by, a.y * by);
        }
    }
};

// What mma() has of 16 heads and 8 tokens, to scores of the first of them.
__device__ inline void store_scores(float* to, const float (&s)[4]) {
    float* const at = to + threadIdx.x % 32 / 4 * SCORES_ROW + threadIdx.x % 4 * 2;
    *(float2*)at = {s[0], s[1]}, *(float2*)(at + 8 * SCORES_ROW) = {s[2], s[3]};
}

// This warp's part of the dot products of 16 heads' queries and a tile's tokens, without scales, to scores [PLANES, ROWS,
// SCORES_ROW]: a quarter of the latents' elements of half of the tokens, and all of the rotated ones of 8.
__device__ inline void multiply_keys(const Queries& q, unsigned tile, float* scores) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = warp % QUARTERS, half = warp / QUARTERS;
    // Each 8 lanes have 8 tokens: of piece `quarter`, and of the one four behind it; of the rotated ones a piece each.
    const unsigned even = tile + (half * 2 + lane / 16) * PANEL_BYTES + swizzled(lane % 16, quarter), odd = even ^ 4 * 16;
    const unsigned rotated = tile + warp / 2 * PANEL_BYTES + swizzled(warp % 2 * 8 + lane % 8, LATENT / 16 + lane / 8);
    float s[4][4] = {}, r[4] = {};
    unsigned y[4], z[4], b[2];
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        ldmatrix(y, (j % 2 ? odd : even) + j / 2 * BOX_BYTES);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            f16_pairs(y[n], b[0], b[1]);
            mma<Operand>(s[n], q.latent[j], b[0], b[1]);
        }
        const int k = j - (STEPS - ROPE_STEPS);  // late, as registers are short: sums follow each other beside the others
        if (k < 0) continue;
        if (k == 0) ldmatrix(z, rotated);
        f16_pairs(z[k], b[0], b[1]);
        mma<Operand>(r, q.rope[k], b[0], b[1]);
    }
    store_scores(scores + QUARTERS * ROWS * SCORES_ROW + warp * 8, r);
#pragma unroll
    for (int n = 0; n < 4; n++) store_scores(scores + quarter * ROWS * SCORES_ROW + half * 32 + n * 8, s[n]);
}

// 16 heads' weights times a tile's values.
__device__ inline void add_values(Values& values, unsigned weights, unsigned tile) {
    const unsigned first = tile + Values::codes_at(0), second = first ^ 2 * 16;  // the piece two behind it
    unsigned p[4];
#pragma unroll
    for (int i = 0; i < PANELS; i++) {
        Values::load_weights(p, weights + i * PANEL * 2);
        values.add_codes(p, first + i * PANEL_BYTES, second + i * PANEL_BYTES);
    }
}
