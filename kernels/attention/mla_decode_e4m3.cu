// One token of each of n sequences over a paged cache of latents in e4m3, where TMA is: mla_decode.cu says what is computed,
// fp8_cache.py what the cache holds. Where TMA is not, mla_decode.cu reads such a cache, too.
//
// A block takes a part of one sequence for 16 heads, which are the rows of its matmuls, and multiplies 64 tokens at a time, a
// tile. Instructions bound it, so that what a tile takes once is what counts: TMA copies, and a score's scale is multiplied
// in once. Each warp has a quarter of the latent's elements of 32 tokens' scores, and of 8 tokens the rotated rest, which has
// a scale of its own; then 2 heads of the softmax, which adds the quarters up; then 64 columns of the values. A tile is asked
// for as soon as all warps have read the one two before it.
//
// What has been cached in earlier steps is asked for before the kernel's predecessor has ended, as in mla_decode.cu; q and
// the 16 tokens that the step's own one is among wait for it.
#include "tma.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "fp8_cache.cuh"

typedef f16 Operand;  // what tensor cores multiply
constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int ROWS = 16, GROUPS = (HEADS + ROWS - 1) / ROWS;              // heads of a block, and blocks for all heads
constexpr int WARPS = 8, THREADS = WARPS * 32, COLUMNS = LATENT / WARPS;  // of the values, of a warp
// Tokens of a box; bytes of one, which has 128 of each; of all of the tokens, in 5 boxes, half of the last being zeros.
constexpr int PANEL = 16, BOX_BYTES = PANEL * 128, PANEL_BYTES = 5 * BOX_BYTES;
constexpr int PANELS = 4, TILE = PANELS * PANEL, TILE_BYTES = PANELS * PANEL_BYTES, STAGES = 2, SCALE_BYTES = TILE * 2;
constexpr int QUARTERS = 4, STEPS = LATENT / 16 / QUARTERS, ROPE_STEPS = ROPE / 16;  // matmul steps of a warp
constexpr int PLANES = QUARTERS + 1;                               // of scores: the last one is of the rotated elements
constexpr int SCORES_ROW = TILE + 8, WEIGHTS_ROW = TILE * 2 + 16;  // floats; bytes: no two of 8 rows in the same banks
constexpr int SCORES_BYTES = PLANES * ROWS * SCORES_ROW * 4, WEIGHTS_BYTES = ROWS * WEIGHTS_ROW;
constexpr int PART = ROWS * LATENT + ROWS;  // floats of a part: means, as threads have them, and logarithms of sums
constexpr int AT_ONCE = 4;                  // splits that one block adds up

static_assert(1024 + STAGES * (TILE_BYTES + SCALE_BYTES) + SCORES_BYTES + WEIGHTS_BYTES + 3 * ROWS * 4 == ROOM,
              "mla_decode_e4m3.py reckons with another layout of shared memory");

#if __CUDA_ARCH__ >= 900
// Where a panel has the piece of 16 bytes of a row, as TMA stores it: box by box, with pieces that change places among eight.
__device__ inline int swizzled(int row, int piece) { return piece / 8 * BOX_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16; }

#include "mla_values.cuh"
#include "mla_parts.cuh"
#include "mla_tiles_e4m3.cuh"

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

// Of two heads, one for each 16 lanes of a warp: a lane has four tokens of each tile.
struct Softmax : SoftmaxState {
    float scale;  // of scores as they are multiplied

    // A tile, of which the first `count` tokens are there: weights, and what sums so far are to be multiplied by. A weight
    // has the scale of its token's latent, which is its value, and `sum` has not.
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
        const int row = count + i / 4, piece = threadIdx.x / 32 * (COLUMNS / 16) + i % 4;
        *(uint4*)(tile + row / PANEL * PANEL_BYTES + swizzled(row % PANEL, piece)) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2)
mla_decode_e4m3(const T* q, const __grid_constant__ TensorMap cache, const unsigned char* scales, const int* tables,
                const int* lengths, T* out, float* parts, int* arrived, int q_row, int table_row, int fill, float scale) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const int b = blockIdx.x / GROUPS, head = blockIdx.x % GROUPS * ROWS, heads = min(HEADS - head, ROWS);
    const int split = blockIdx.y, most = gridDim.y;
    const int length = __ldcg(lengths + b);
    const Span span(length, split, most, fill);
    T* const to = out + ((long long)b * HEADS + head) * LATENT;
    if (split >= span.count) return;
    if (length == 0) return store_zeros(to, heads);
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
    Part part = {};
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
    const long long first = (long long)blockIdx.x * most;
    if (add_up(part, split, span.count, parts + first * PART, arrived + first, (int*)at.shrink)) part.mean.store(to, heads);
#endif
}
