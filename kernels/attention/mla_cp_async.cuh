// Tiles of mla_decode.cu that threads copy, each token once: in 16 bits, or in e4m3 where TMA is not.
//
// A ring holds RING_PANELS panels; a tile is two of them. Each warp copies four tokens of each tile, and multiplies a
// quarter of the elements of 16 tokens' scores. A panel has its tokens' rows, and behind them, where FP8, their scales:
// of latents and then of the rest.
#include "async_copy.cuh"

#define CACHE const T*
constexpr int ROW = WIDTH * (FP8 ? 1 : 2);                  // bytes of a token
constexpr int PANEL_BYTES = PANEL * (ROW + (FP8 ? 2 : 0));  // with their scales
constexpr int STEPS = WIDTH / 16 / QUARTERS;                // matmul steps of a warp's part of a score
constexpr int SCORES_BYTES = QUARTERS * ROWS * SCORES_ROW * 4;
constexpr int EARLY = 4;  // tiles that are asked for early, those behind the ring to the second-level cache; 8 at most

static_assert(RING_PANELS * PANEL_BYTES + SCORES_BYTES + WEIGHTS_BYTES + 3 * ROWS * 4 == SMEM_BYTES,
              "mla_decode.py reckons with another layout of shared memory");
static_assert(TILE == 2 * PANEL && RING_PANELS >= 4, "a tile of two panels, and another one under way");

// Places change among the eight of 128 bytes; where FP8, among the four of 64: neighbouring rows begin 64 bytes apart.
__device__ inline int swizzled(int row, int vec) { return row * ROW + (vec ^ (FP8 ? row / 2 % 4 : row % 8)) * 16; }

// Copies of one warp: four tokens of each tile, all in one panel. Rows past `stop` become zeros.
struct Rows {
    const char* cache;
    const unsigned char* scales;
    const int* table;
    unsigned ring;
    int start, stop;
    int slots, ahead;  // of the tiles from a multiple of 8 on, and of the 8 behind them: lane l has row l % 4 of tile l / 4

    __device__ Rows(const T* cache, const unsigned char* scales, const int* table, unsigned ring, const Span& span)
        : cache((const char*)cache), scales(scales), table(table), ring(ring), start(span.start + first()), stop(span.stop) {
        slots = find(0), ahead = find(8);
    }
    __device__ static int first() { return threadIdx.x / 32 * 4; }  // in a tile
    __device__ static int panel() { return first() / PANEL; }
    // Past the first-level cache, where another step may have left tables: grid_wait() has not been passed.
    __device__ int find(int tile) const {
        const int token = start + (tile + threadIdx.x % 32 / 4) * TILE + threadIdx.x % 4;
        return token < stop ? __ldcg(table + token / SIZE) * SIZE + token % SIZE : -1;
    }
    // To be called once for each tile, one after the other, from 0 on.
    __device__ void turn_to(int tile) {
        if (tile % 8 || !tile) return;
        slots = ahead, ahead = find(tile + 8);
    }
    // Tiles from this one on, of the first EARLY.
    __device__ void prefetch(int tile) const {
        const int mine = threadIdx.x % 32 / 4;
        if (mine >= tile && mine < EARLY && slots >= 0) prefetch_bulk(cache + (long long)slots * ROW, ROW);
    }
    // The rows of `some`'s bits.
    __device__ void copy(int tile, int some) const {
        const int lane = threadIdx.x % 32, row = first() % PANEL, from = tile % 8 * 4;
        const unsigned to = ring + (tile * 2 + panel()) % RING_PANELS * PANEL_BYTES;
        const char* const vec = cache + lane * 16;
        const int place = row * ROW, across = lane ^ (FP8 ? row / 2 % 4 : row % 8);
#pragma unroll
        for (int r = 0; r < 4; r++) {  // vectors `lane` and, but for FP8, lane + 32, as swizzled() has them
            const int slot = __shfl_sync(~0u, slots, from + r);
            if (!(some >> r & 1)) continue;
            const char* x = vec + (long long)max(slot, 0) * ROW;
            const unsigned at = to + place + r * ROW + (across ^ (FP8 ? r / 2 : r)) * 16;
            copy_async16(at, x, slot >= 0);
            if (!FP8) copy_async16(at + 512, x + 512, slot >= 0);
        }
        constexpr int REST = ROW / 16 % 32;  // vectors of each row, that lanes have side by side
        const int r = lane / REST % 4, slot = __shfl_sync(~0u, slots, from + r), last = ROW / 16 - REST + lane % REST;
        if (lane < 4 * REST && (some >> r & 1))
            copy_async16(to + swizzled(row + r, last), cache + (long long)max(slot, 0) * ROW + last * 16, slot >= 0);
    }
    // A panel's scales, which lie side by side in the cache: by the first of the panel's warps, of the latents and of the rope
    // part by a lane each. All of the panel's tokens have to be there.
    __device__ void copy_scales(int tile) const {
        if (FP8 && first() % PANEL == 0) {
            const int slot = __shfl_sync(~0u, slots, tile % 8 * 4), at = max(slot, 0), part = threadIdx.x % 32;
            const unsigned to = ring + (tile * 2 + panel()) % RING_PANELS * PANEL_BYTES + PANEL * ROW + part * PANEL;
            if (part < 2) copy_async16(to, scales + (at / SIZE * 2 + part) * SIZE + at % SIZE, slot >= 0);
        }
    }
};

// Tiles that a warp's copies are ahead of the tile that is multiplied, of the first or the second panel of each.
__device__ constexpr int tiles_ahead(int panel) { return (RING_PANELS - 1 - panel) / 2; }

// Until this thread's copies of a tile are there.
template <int AHEAD> __device__ inline void wait_for_tile(bool first) {
    if (first)
        wait_for_groups<AHEAD>();
    else  // the newest tile has not been asked for yet
        wait_for_groups<AHEAD - 1>();
}
__device__ inline void wait_for_tile_of(int panel, bool first) {
    if (panel)
        wait_for_tile<tiles_ahead(1)>(first);
    else
        wait_for_tile<tiles_ahead(0)>(first);
}

// The ring's first tiles, but for the step's own token, a group for each tile but the last of the part: what may be read
// before the kernel's predecessor has ended; what has no room there is brought near. Then, after it, the rest of them.
__device__ inline void copy_early(Rows& rows, int tiles, int most, int newest) {
#pragma unroll 1
    for (int t = 0; t <= most && t < tiles; t++) {
        const int r = newest - t * TILE - Rows::first();  // if it is one of this warp's rows of the tile
        rows.copy(t, r >= 0 && r < 4 ? 15 & ~(1 << r) : 15);
        if (newest / PANEL != t * 2 + Rows::panel()) rows.copy_scales(t);
        if (t < tiles - 1) commit_copies();
    }
    rows.prefetch(most + 1);
}
__device__ inline void copy_newest(const Rows& rows, int tiles, int most, int newest) {
    const int t = newest / TILE, r = newest % TILE - Rows::first();
    if (t <= most && t < tiles && r >= 0 && r < 4) rows.copy(t, 1 << r);
    if (t <= most && t < tiles && newest / PANEL % 2 == Rows::panel()) rows.copy_scales(t);
#pragma unroll 1
    for (int i = min(tiles - 1, most + 1); i <= most; i++) commit_copies();
}

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

// Dot products of a panel's 16 tokens and a warp's quarter of 16 heads' elements: sums of each 8 tokens, as mma() has them.
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
                e4m3x4_to_f16(y[i], b[0], b[1]);
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

// Softmax of two heads, one for each 16 lanes of a warp: a lane has two tokens of each tile.
struct Softmax : SoftmaxState {
    // A tile, of which the first `count` tokens are there: weights, and what sums so far are to be multiplied by.
    // of_values: where FP8, exponents of the scales of this lane's tokens' values. A weight has the scale in it then, and
    // `sum` has not.
    __device__ void take(const float* scores, unsigned char* weights, float* shrink, int count, float scale,
                         const unsigned char* of_values) {
        const int token = threadIdx.x % 16 * 2;
        float2 s = {0, 0};
#pragma unroll
        for (int i = 0; i < QUARTERS; i++) {
            const float2 x = *(const float2*)(scores + (i * ROWS + head()) * SCORES_ROW + token);
            s.x += x.x, s.y += x.y;
        }
        const bool there = token < count, next_there = token + 1 < count;
        const int exponent = FP8 && there ? of_values[0] : 127, next_exponent = FP8 && next_there ? of_values[1] : 127;
        s.x *= scale, s.y *= scale;
        if (FP8) s.x += exponent - 127, s.y += next_exponent - 127;
        if (!there) s.x = MINUS_INFINITY;
        if (!next_there) s.y = MINUS_INFINITY;
        float best = fmaxf(s.x, s.y);
#pragma unroll
        for (int step = 8; step; step /= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
        best = fmaxf(best - LIFT, top);
        const float by = exp2_approx(top - best), a = exp2_approx(s.x - best), b = exp2_approx(s.y - best);
        top = best, sum = sum * by + a * inverse_scale(exponent) + b * inverse_scale(next_exponent);
        *(unsigned*)(weights + head() * WEIGHTS_ROW + token * 2) = pack<Operand>(a, b);
        if (token == 0) shrink[head()] = by;
    }
};

struct Lane {  // what the kernel computes first
    int lane = threadIdx.x % 32, panel = Rows::panel();
};

// Attends to the split. Returns where shared memory is free.
__device__ __forceinline__ int* attend(Part& part, const T* q, int q_row, const T* cache, const unsigned char* scales,
                                       const int* tables, int table_row, int b, int head, int heads, int length,
                                       const Span& span, float scale, uint4* memory, const Lane& of_thread) {
    const int lane = of_thread.lane, panel = of_thread.panel;
    const unsigned ring = smem_address(memory), of_weights = ring + RING_PANELS * PANEL_BYTES + SCORES_BYTES;
    float* const scores = (float*)((unsigned char*)memory + RING_PANELS * PANEL_BYTES);
    unsigned char* const weights = (unsigned char*)scores + SCORES_BYTES;
    float *const shrink = (float*)(weights + WEIGHTS_BYTES), *const inverse = shrink + ROWS, *const sums = inverse + ROWS;
    const int tiles = span.tiles(), ahead = tiles_ahead(panel), newest = length - 1 - span.start;
    Rows rows(cache, scales, tables + (long long)b * table_row, ring, span);
    copy_early(rows, tiles, ahead, newest);
    grid_wait();
    launch_dependents();
    copy_newest(rows, tiles, ahead, newest);
    const Queries queries(q + (long long)b * q_row + head * WIDTH, heads);
    Softmax softmax;
#pragma unroll 1
    for (int t = 0; t < tiles; t++) {
        wait_for_tile_of(panel, t == 0);
        __syncthreads();  // all threads' copies are there, and all have multiplied the tile before
        if (t > 0) {
            rows.turn_to(t + ahead);
            if (t + ahead < tiles) rows.copy(t + ahead, 15), rows.copy_scales(t + ahead);
            commit_copies();
        }
        auto place = [&](int panel) { return (t * 2 + panel) % RING_PANELS * PANEL_BYTES; };
        auto scales_of = [&](int panel) { return (const unsigned char*)memory + place(panel) + PANEL * ROW; };
        const int mine = threadIdx.x / 32 / QUARTERS, token = threadIdx.x % 16 * 2;
        multiply_keys(queries, ring + place(mine), scales_of(mine), scores);
        __syncthreads();
        softmax.take(scores, weights, shrink, span.stop - span.start - t * TILE, scale, scales_of(token / PANEL) + token % PANEL);
        __syncthreads();
        part.mean.scale(shrink);
#pragma unroll
        for (int i = 0; i < 2; i++)
            part.mean.add_panel(of_weights + i * PANEL * 2, ring + place(i));
    }
    softmax.finish(inverse, sums);
    __syncthreads();
    part.mean.scale(inverse);
    part.weight[0] = sums[lane / 4], part.weight[1] = sums[lane / 4 + 8];
    return (int*)shrink;
}
