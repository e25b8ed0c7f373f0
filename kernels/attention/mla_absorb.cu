// What decoding sequences' attention to latents begins with (mla.py), from sm_80 on: queries for latents, and the step's
// tokens in the cache.
//
// The first blocks have COLUMNS elements of one head's queries of TILE tokens: q's first NOPE elements times the keys'
// weights. They rotate a part of these tokens' others, too. The last blocks store a token with each warp: its latent, normed,
// and its rotated key. All that a block reads is on its way at once: weights before the kernel's predecessor has ended, the
// rest behind grid_wait(). A GEMM before leaves no room on its multiprocessors, so that most blocks begin when it has ended,
// and each latency behind another one would be time of the step.
#include "async_copy.cuh"
#include "mma.cuh"

constexpr int LATENT = 512, ROPE = 64, HALF = ROPE / 2, WIDTH = NOPE + ROPE, KEPT = LATENT + ROPE;
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int TILE = 64, COLUMNS = 64, BLOCKS = LATENT / COLUMNS;  // tokens, elements of a block; blocks of a head
constexpr int ROTATED = TILE / BLOCKS;                             // tokens that a block rotates a head of
constexpr int PIECES = NOPE / 8;                                   // of 16 bytes, of a token's row
constexpr int ROW = NOPE * 2, W_ROW = COLUMNS * 2;                 // bytes

static_assert(ROTATED * HALF == THREADS, "a thread has one pair");
static_assert(HALF == 32 && LATENT % 256 == 0, "a lane has a pair of a token's key, and pieces of its latent");
static_assert(TILE * ROW + NOPE * W_ROW == ROOM, "mla_absorb.py reckons with another layout of shared memory");
static_assert(NOPE % 64 == 0, "places change among eight pieces");

#if __CUDA_ARCH__ >= 800
// Where the elements of a pair are in a vector, and of its angle in a token's row.
struct Place {
    int first, second, angle;

    __device__ Place(int pair)
        : first(INTERLEAVED ? 2 * pair : pair), second(INTERLEAVED ? 2 * pair + 1 : pair + HALF), angle(pair) {}
};

struct Pair {
    float a, b, c, s;

    // x: a vector; cos and sin: its token's, of which sin's first half is negated.
    __device__ void load(const T* x, const float* cos, const float* sin, Place at) {
        a = to_float(x[at.first]), b = to_float(x[at.second]);
        c = cos[at.angle], s = sin[HALF + at.angle];
    }
    __device__ void store(T* to, Place at) const {
        to[at.first] = from_float<T>(a * c - b * s), to[at.second] = from_float<T>(b * c + a * s);
    }
};

// A warp: 16 tokens of x [TILE, NOPE] times 32 columns of w [NOPE, COLUMNS]; to: queries of the tile's first token, of which
// `there` are.
__device__ inline void multiply(unsigned x, unsigned w, T* to, int there) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = warp % 4 * 16, columns = warp / 4 * 32;
    const unsigned from_x = x + (rows + lane % 16) * ROW, from_w = w + lane % 16 * W_ROW;
    float y[4][4] = {};  // of 8 columns each
#pragma unroll
    for (int k = 0; k < NOPE / 16; k++) {
        unsigned a[4];
        ldmatrix(a, from_x + (k * 2 + lane / 16 ^ lane % 8) * 16);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            unsigned b[4];
            ldmatrix_transposed(b, from_w + k * 16 * W_ROW + (columns / 8 + n * 2 + lane / 16 ^ lane % 8) * 16);
            mma<T>(y[2 * n], a, b[0], b[1]);
            mma<T>(y[2 * n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = rows + lane / 4 + h * 8;
        T* const here = to + (long long)row * HEADS * KEPT + columns + lane % 4 * 2;
        if (row >= there) continue;
#pragma unroll
        for (int n = 0; n < 4; n++) *(unsigned*)(here + n * 8) = pack<T>(y[n][2 * h], y[n][2 * h + 1]);
    }
}

// A warp: one token, to its slot, unless that is negative.
__device__ inline void store_latent(const T* x, const T* norm, const float* cos, const float* sin, T* cache, const long long* slot,
                                    float eps, bool there) {
    constexpr int EACH = LATENT / 256;
    const int lane = threadIdx.x % 32;
    Vec<T, 8> weights[EACH], row[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) weights[i] = ((const Vec<T, 8>*)norm)[i * 32 + lane];
    grid_wait();
    launch_dependents();
    if (!there) return;
    const long long to = *slot;
    Pair pair;
#pragma unroll
    for (int i = 0; i < EACH; i++) row[i] = ((const Vec<T, 8>*)x)[i * 32 + lane];
    pair.load(x + LATENT, cos, sin, lane);
    __syncwarp();  // the compiler would ask for the pair once its slot is known
    float squares = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) squares += to_float(row[i].x[j]) * to_float(row[i].x[j]);
    const float scale = rsqrtf(warp_sum(squares) / LATENT + eps);
    if (to < 0) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            row[i].x[j] = from_float<T>(to_float(row[i].x[j]) * scale * to_float(weights[i].x[j]));
        ((Vec<T, 8>*)(cache + to * KEPT))[i * 32 + lane] = row[i];
    }
    pair.store(cache + to * KEPT + LATENT, lane);
}
#endif

// q [tokens, HEADS, WIDTH], of rows of q_row elements; latents [tokens, KEPT], likewise; up [HEADS, NOPE + VALUE, LATENT];
// queries [tokens, HEADS, KEPT]; cache [slots, KEPT]. programs: blocks for queries.
extern "C" __global__ void __launch_bounds__(THREADS)
mla_absorb(const T* q, const T* latents, const T* norm, const float* cos, const float* sin, T* cache, const long long* slots,
           const T* up, T* queries, float eps, int q_row, int latents_row, int tokens, int programs) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 memory[];
    if ((int)blockIdx.x >= programs) {
        const long long token = (blockIdx.x - programs) * WARPS + threadIdx.x / 32;
        store_latent(latents + token * latents_row, norm, cos + token * ROPE, sin + token * ROPE, cache, slots + token, eps,
                     token < tokens);
        return;
    }
    const int head = blockIdx.x / BLOCKS % HEADS, block = blockIdx.x % BLOCKS, first = blockIdx.x / (BLOCKS * HEADS) * TILE;
    const unsigned x = smem_address(memory), w = x + TILE * ROW;
    const T* const from_up = up + (long long)head * (NOPE + VALUE) * LATENT + block * COLUMNS;
    for (int i = threadIdx.x; i < NOPE * 8; i += THREADS) {
        const int row = i / 8, piece = i % 8;
        copy_async16(w + row * W_ROW + (piece ^ row % 8) * 16, from_up + (long long)row * LATENT + piece * 8, true);
    }
    grid_wait();
    launch_dependents();
    for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        const T* const from = q + (long long)min(first + row, tokens - 1) * q_row + head * WIDTH + piece * 8;
        copy_async16(x + row * ROW + (piece ^ row % 8) * 16, from, first + row < tokens);
    }
    const int pair = threadIdx.x % HALF, token = first + block * ROTATED + threadIdx.x / HALF;
    Pair rotated;
    if (token < tokens)
        rotated.load(q + (long long)token * q_row + head * WIDTH + NOPE, cos + (long long)token * ROPE,
                     sin + (long long)token * ROPE, pair);
    wait_for_copies();
    __syncthreads();
    T* const to = queries + ((long long)first * HEADS + head) * KEPT;
    multiply(x, w, to + block * COLUMNS, tokens - first);
    if (token < tokens) rotated.store(to + (long long)(token - first) * HEADS * KEPT + LATENT, pair);
#endif
}
