// Tiles of mla_decode.cu in e4m3, which TMA brings.
//
// Instructions bound it, so that what a tile takes once is what counts: TMA copies, and a score's scale is multiplied
// in once. Each warp has a quarter of the latent's elements of 32 tokens' scores, and of 8 tokens the rotated rest,
// which has a scale of its own. A tile is asked for as soon as all warps have read the one two before it.
#include "tma.cuh"

#define CACHE const __grid_constant__ TensorMap
// Bytes of a box, which has 128 of each of a panel's tokens; of a panel, in 5 boxes, half of the last being zeros.
constexpr int BOX_BYTES = PANEL * 128, PANEL_BYTES = 5 * BOX_BYTES;
constexpr int PANELS = TILE / PANEL, TILE_BYTES = PANELS * PANEL_BYTES, STAGES = RING_PANELS / PANELS, SCALE_BYTES = TILE * 2;
constexpr int STEPS = LATENT / 16 / QUARTERS, ROPE_STEPS = ROPE / 16;  // matmul steps of a warp
constexpr int PLANES = QUARTERS + 1;                                   // of scores: the last one is of the rotated elements
constexpr int SCORES_BYTES = PLANES * ROWS * SCORES_ROW * 4;

static_assert(1024 + STAGES * (TILE_BYTES + SCALE_BYTES) + SCORES_BYTES + WEIGHTS_BYTES + 3 * ROWS * 4 == SMEM_BYTES,
              "mla_decode.py reckons with another layout of shared memory");
static_assert(FP8 && TILE == 64, "what warps take of a tile");

// Position as TMA stores it: box by box, whose 16-byte vectors are permuted among eight.
__device__ inline int swizzled(int row, int vec) { return vec / 8 * BOX_BYTES + row * 128 + (vec % 8 ^ row % 8) * 16; }

// TMA requests of the first warps: each a panel of each tile, and its scales. `full` has an arrival of each of them,
// `empty` of all warps.
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
    // Asks for as many tiles as the ring holds: the panel that the newest token is in, or all others.
    __device__ void ask_first(int tiles, int newest, bool of_newest) {
        for (int t = 0; t < STAGES && t < tiles; t++)
            if ((newest == t * PANELS + panel()) == of_newest) ask(t);
    }
};

// This warp's steps of 16 heads' queries, as the first operand of matmuls: step j of the latent has the elements from j
// * 64 on and 16 times the warp's quarter. ldmatrix moves pairs of bytes, so that of 16 elements of a key a lane has
// four neighbours: so it has here. Heads past the last one are zeros. Each head is divided by a power of two
// (query_exponent).
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

// Moves mma()'s results of 16 heads and 8 tokens to scores of the first of them.
__device__ inline void store_scores(float* to, const float (&s)[4]) {
    float* const at = to + threadIdx.x % 32 / 4 * SCORES_ROW + threadIdx.x % 4 * 2;
    *(float2*)at = {s[0], s[1]}, *(float2*)(at + 8 * SCORES_ROW) = {s[2], s[3]};
}

// This warp's part of the dot products of 16 heads' queries and a tile's tokens, without scales, to scores [PLANES,
// ROWS, SCORES_ROW]: a quarter of the latents' elements of half of the tokens, and all of the rotated ones of 8.
__device__ inline void multiply_keys(const Queries& q, unsigned tile, float* scores) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = warp % QUARTERS, half = warp / QUARTERS;
    // Each 8 lanes have 8 tokens: of vector `quarter`, and of the one four behind it; of the rotated ones a vector
    // each.
    const unsigned even = tile + (half * 2 + lane / 16) * PANEL_BYTES + swizzled(lane % 16, quarter), odd = even ^ 4 * 16;
    const unsigned rotated = tile + warp / 2 * PANEL_BYTES + swizzled(warp % 2 * 8 + lane % 8, LATENT / 16 + lane / 8);
    float s[4][4] = {}, r[4] = {};
    unsigned y[4], z[4], b[2];
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        ldmatrix(y, (j % 2 ? odd : even) + j / 2 * BOX_BYTES);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            e4m3x4_to_f16(y[n], b[0], b[1]);
            mma<Operand>(s[n], q.latent[j], b[0], b[1]);
        }
        const int k = j - (STEPS - ROPE_STEPS);  // late, as registers are short: sums follow each other beside the others
        if (k < 0) continue;
        if (k == 0) ldmatrix(z, rotated);
        e4m3x4_to_f16(z[k], b[0], b[1]);
        mma<Operand>(r, q.rope[k], b[0], b[1]);
    }
    store_scores(scores + QUARTERS * ROWS * SCORES_ROW + warp * 8, r);
#pragma unroll
    for (int n = 0; n < 4; n++) store_scores(scores + quarter * ROWS * SCORES_ROW + half * 32 + n * 8, s[n]);
}

// 16 heads' weights times a tile's values.
__device__ inline void add_values(Values& values, unsigned weights, unsigned tile) {
    const unsigned first = tile + Values::codes_at(0), second = first ^ 2 * 16;  // the vector two behind it
    unsigned p[4];
#pragma unroll
    for (int i = 0; i < PANELS; i++) {
        Values::load_weights(p, weights + i * PANEL * 2);
        values.add_codes(p, first + i * PANEL_BYTES, second + i * PANEL_BYTES);
    }
}

struct Buffers {  // in dynamic shared memory
    unsigned ring;                            // STAGES tiles
    unsigned char *tiles, *scales, *weights;  // the ring; [STAGES, SCALE_BYTES]; [ROWS, WEIGHTS_ROW]
    float *scores, *shrink, *inverse, *sums;  // [PLANES, ROWS, SCORES_ROW], and of each head one

    __device__ explicit Buffers(uint4* memory) : ring((smem_address(memory) + 1023) / 1024 * 1024) {
        tiles = (unsigned char*)memory + (ring - smem_address(memory)), scales = tiles + STAGES * TILE_BYTES;
        scores = (float*)(scales + STAGES * SCALE_BYTES), weights = (unsigned char*)scores + SCORES_BYTES;
        shrink = (float*)(weights + WEIGHTS_BYTES), inverse = shrink + ROWS, sums = inverse + ROWS;
    }
};

// Softmax of two heads, one for each 16 lanes of a warp: a lane has four tokens of each tile.
struct Softmax : SoftmaxState {
    float scale;  // of scores as they are multiplied

    // A tile, of which the first `count` tokens are there: weights, and what sums so far are to be multiplied by. A
    // weight has the scale of its token's latent, which is its value, and `sum` has not.
    __device__ void take(const float* scores, const unsigned char* scales, unsigned char* weights, float* shrink, int count) {
        const int token = threadIdx.x % 16 * 4;
        auto plane = [&](int i) { return *(const float4*)(scores + (i * ROWS + head()) * SCORES_ROW + token); };
        const float4 first = plane(0), last = plane(QUARTERS);
        float s[4] = {first.x, first.y, first.z, first.w}, w[4];
        const float rotated[4] = {last.x, last.y, last.z, last.w};
#pragma unroll
        for (int i = 1; i < QUARTERS; i++) {
            const float4 x = plane(i);
            s[0] += x.x, s[1] += x.y, s[2] += x.z, s[3] += x.w;
        }
        const unsigned char* const exponents = scales + token / PANEL * 2 * PANEL + token % PANEL;
        const unsigned of_latents = *(const unsigned*)exponents, of_rotated = *(const unsigned*)(exponents + PANEL);
        int exponent[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            exponent[i] = of_latents >> 8 * i & 255;
            const float dot = s[i] * scale_of(exponent[i]) + rotated[i] * scale_of(of_rotated >> 8 * i & 255);
            s[i] = dot * scale + (exponent[i] - 127);
        }
        if (count < TILE) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (token + i >= count) s[i] = MINUS_INFINITY, exponent[i] = 127;
        }
        float best = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
#pragma unroll
        for (int step = 8; step; step /= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
        best = fmaxf(best - LIFT, top);
        const float by = exp2_approx(top - best);
        top = best, sum *= by;
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = exp2_approx(s[i] - best), sum += w[i] * inverse_scale(exponent[i]);
        *(uint2*)(weights + head() * WEIGHTS_ROW + token * 2) = make_uint2(pack<Operand>(w[0], w[1]), pack<Operand>(w[2], w[3]));
        if (token == 0) shrink[head()] = by;
    }
};

// This warp's columns of the values that are not there, from row `count` on: what was never copied may be no number.
__device__ inline void clear_rows(unsigned char* tile, int count) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < (TILE - count) * 4; i += 32) {
        const int row = count + i / 4, vec = threadIdx.x / 32 * (COLUMNS / 16) + i % 4;
        *(uint4*)(tile + row / PANEL * PANEL_BYTES + swizzled(row % PANEL, vec)) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
}

struct Lane {};

// Attends to the split. Returns where shared memory is free.
__device__ __forceinline__ int* attend(Part& part, const T* q, int q_row, const TensorMap& cache,
                                       const unsigned char* scales, const int* tables, int table_row, int b, int head, int heads, int length,
                                       const Span& span, float scale, uint4* memory, const Lane&) {
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const Buffers at(memory);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&cache);
        for (int s = 0; s < STAGES; s++) mbarrier_init(full + s, PANELS), mbarrier_init(empty + s, WARPS);
        fence_mbarrier_init();
    }
    const int tiles = span.tiles(), newest = (length - 1 - span.start) / PANEL;
    Copies copies = {&cache, scales, tables + (long long)b * table_row, full, empty, at.ring, span.start, span.stop};
    copies.begin();
    __syncthreads();
    copies.ask_first(tiles, newest, false);
    grid_wait();
    launch_dependents();
    copies.ask_first(tiles, newest, true);
    const Queries queries(q + (long long)b * q_row + head * WIDTH, heads, (float*)at.weights);
    Softmax softmax = {{}, scale * scale_of(query_exponent(queries.most((float*)at.weights, Softmax::head())))};
#pragma unroll 1
    for (int t = 0; t < tiles; t++) {
        const int stage = t % STAGES, count = span.stop - span.start - t * TILE;
        const unsigned tile = at.ring + stage * TILE_BYTES;
        if (t > 0 && t + 1 < tiles) copies.ask(t + 1);
        mbarrier_wait(full + stage, t / STAGES);
        multiply_keys(queries, tile, at.scores);
        __syncthreads();  // scores are there, and all have read the weights before
        softmax.take(at.scores, at.scales + stage * SCALE_BYTES, at.weights, at.shrink, count);
        __syncthreads();
        part.mean.scale(at.shrink);
        if (count < TILE) clear_rows(at.tiles + stage * TILE_BYTES, count);
        add_values(part.mean, smem_address(at.weights), tile);
        release_stage(empty + stage);
    }
    softmax.finish(at.inverse, at.sums);
    __syncthreads();
    part.mean.scale(at.inverse);
    for (int h = 0; h < 2; h++) part.weight[h] = at.sums[threadIdx.x % 32 / 4 + h * 8];
    return (int*)at.shrink;
}
