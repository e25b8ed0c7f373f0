// One token of each of n sequences over a paged cache of latents (mla.py), from sm_80 on: of all heads each token has one
// key of LATENT + ROPE elements, whose first LATENT are the value.
//
// A block takes a part of one sequence for 16 heads, which are the rows of its matmuls. Its threads copy panels of 16
// tokens to a ring in shared memory, HELD of them ahead, and multiply two at a time, a tile: each warp a quarter of the
// elements of 16 tokens' scores, so that it keeps q in registers; then 2 heads of the softmax, which adds the quarters up;
// then 64 columns of the values. Online softmax after FlashAttention-2 (Dao 2023, arXiv 2307.08691), parts of a sequence
// after Flash-Decoding (Dao et al. 2023).
//
// What has been cached in earlier steps is asked for before the kernel's predecessor has ended, as are lengths and
// tables: whatever comes before must let no kernel start until all before it has ended, as absorb_kernel of
// mla_store_triton.py does. The step's own tokens, each the last one of its sequence, and q wait for it.
//
// FP8: the cache has e4m3 codes, and for each block its tokens' scales, of latents and then of the rest
// (rope/fp8_cache.py). mla_operands.cuh and mla_values.cuh say how they are multiplied. With TMA such a cache goes to
// mla_decode_e4m3.cu.
#include "async_copy.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "fp8_cache.cuh"

typedef OperandType<FP8 != 0>::type Operand;  // what tensor cores multiply
constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE, ROW = WIDTH * (FP8 ? 1 : 2);  // ROW: bytes of a token
constexpr int ROWS = 16, GROUPS = (HEADS + ROWS - 1) / ROWS;                    // heads of a block, and blocks for all heads
constexpr int WARPS = 8, THREADS = WARPS * 32, COLUMNS = LATENT / WARPS;        // of the values, of a warp
constexpr int PANEL = 16, TILE = 2 * PANEL, PANEL_BYTES = PANEL * (ROW + (FP8 ? 2 : 0));  // tokens; with their scales
constexpr int QUARTERS = WARPS / 2, STEPS = WIDTH / 16 / QUARTERS;              // matmul steps of a warp's part of a score
constexpr int SCORES_ROW = TILE + 8, WEIGHTS_ROW = TILE * 2 + 16;  // floats; bytes: no two of 8 rows in the same banks
constexpr int SCORES_BYTES = QUARTERS * ROWS * SCORES_ROW * 4, WEIGHTS_BYTES = ROWS * WEIGHTS_ROW;
constexpr int PART = ROWS * LATENT + ROWS;  // floats of a part: means, as threads have them, and logarithms of sums
constexpr int AT_ONCE = 4;                  // splits that one block adds up
constexpr int EARLY = 4;  // tiles that are asked for early, those behind the ring to the second-level cache; 8 at most

static_assert(HELD * PANEL_BYTES + SCORES_BYTES + WEIGHTS_BYTES + 3 * ROWS * 4 == ROOM,
              "mla_decode.py reckons with another layout of shared memory");
static_assert(HELD >= 4, "a tile, and another one under way");

#if __CUDA_ARCH__ >= 800
// A panel has its tokens' rows, and behind them, where FP8, their scales: of latents and then of the rest.
//
// Where a row's piece of 16 bytes lies: places change among the eight of 128 bytes, so that eight rows' pieces are in
// different banks. Where FP8, among the four of 64 bytes: neighbouring rows begin 64 bytes apart in them.
__device__ inline int swizzled(int row, int piece) { return row * ROW + (piece ^ (FP8 ? row / 2 % 4 : row % 8)) * 16; }

#include "mla_values.cuh"
#include "mla_parts.cuh"
#include "mla_rows.cuh"
#include "mla_operands.cuh"

// Of two heads, one for each 16 lanes of a warp: a lane has two tokens of each tile.
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

#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
mla_decode(const T* q, const T* cache, const unsigned char* scales, const int* tables, const int* lengths, T* out, float* parts, int* arrived, int q_row,
           int table_row, int fill, float scale) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 memory[];
    const int b = blockIdx.x / GROUPS, head = blockIdx.x % GROUPS * ROWS, heads = min(HEADS - head, ROWS);
    const int split = blockIdx.y, most = gridDim.y, lane = threadIdx.x % 32, panel = Rows::panel();
    const int length = __ldcg(lengths + b);
    const Span span(length, split, most, fill);
    T* const to = out + ((long long)b * HEADS + head) * LATENT;
    if (split >= span.count) return;
    if (length == 0) return store_zeros(to, heads);
    const unsigned ring = smem_address(memory), of_weights = ring + HELD * PANEL_BYTES + SCORES_BYTES;
    float* const scores = (float*)((unsigned char*)memory + HELD * PANEL_BYTES);
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
    Part part = {};
#pragma unroll 1
    for (int t = 0; t < tiles; t++) {
        wait_for_tile_of(panel, t == 0);
        __syncthreads();  // all threads' copies are there, and all have multiplied the tile before
        if (t > 0) {
            rows.turn_to(t + ahead);
            if (t + ahead < tiles) rows.copy(t + ahead, 15), rows.copy_scales(t + ahead);
            commit_copies();
        }
        auto place = [&](int panel) { return (t * 2 + panel) % HELD * PANEL_BYTES; };
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
    const long long first = (long long)blockIdx.x * most;
    if (add_up(part, split, span.count, parts + first * PART, arrived + first, (int*)shrink)) part.mean.store(to, heads);
#endif
}
