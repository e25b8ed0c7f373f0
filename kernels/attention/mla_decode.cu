// One token of each of n sequences over a paged cache of latents (mla.py), from sm_80 on: of all heads each token has
// one key of LATENT + ROPE elements, whose first LATENT are the value.
//
// A block takes a part of one sequence for 16 heads, which are the rows of its matmuls, and multiplies TILE tokens at a
// time. Each warp multiplies a part of the elements for scores, so that it keeps q in registers; then 2 heads of the
// softmax, which adds these parts up; then 64 columns of the values. One of two headers, TILES, brings tiles to shared
// memory and multiplies them: by mla_cp_async.cuh threads copy 16 bits or e4m3, by mla_tma.cuh TMA brings e4m3. Online
// softmax after FlashAttention-2 (Dao 2023, arXiv 2307.08691), parts of a sequence after Flash-Decoding (Dao et al.
// 2023).
//
// What has been cached in earlier steps is asked for before the kernel's predecessor has ended, as are lengths and
// tables: whatever comes before must let no kernel start until all before it has ended, as absorb_kernel of
// mla_store_triton.py does. The step's own tokens, each the last one of its sequence, and q wait for it.
//
// FP8: the cache has e4m3 codes, and for each block its tokens' scales, of latents and then of the rest
// (rope/fp8_cache.py). Codes become f16, whatever T is, by one instruction for two (e4m3x4_to_f16). ldmatrix moves
// pairs of bytes, so that of 16 elements of a key a lane has four neighbours, and queries are loaded in the same order;
// of values an operand has the even columns of 16, and another one the odd ones. Queries are divided by a power of two
// (query_exponent). No element is multiplied by its scale: scores are by those of keys, and a token's weight has its
// value's.
#include "mma.cuh"
#include "half2.cuh"
#include "fp8_cache.cuh"

typedef OperandType<FP8 != 0>::type Operand;  // what tensor cores multiply
constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int ROWS = 16, GROUPS = (HEADS + ROWS - 1) / ROWS;              // heads of a block, and blocks for all heads
constexpr int WARPS = 8, THREADS = WARPS * 32, COLUMNS = LATENT / WARPS;  // of the values, of a warp
constexpr int PANEL = 16;    // tokens: a tile has TILE / PANEL panels
constexpr int QUARTERS = 4;  // of a score's elements, which as many warps multiply
constexpr int SCORES_ROW = TILE + 8, WEIGHTS_ROW = TILE * 2 + 16;  // floats; bytes: no two of 8 rows in the same banks
constexpr int WEIGHTS_BYTES = ROWS * WEIGHTS_ROW;
constexpr int PART = ROWS * LATENT + ROWS;  // floats of a part: means, as threads have them, and logarithms of sums
constexpr int AT_ONCE = 4;                  // splits that one block adds up

#if __CUDA_ARCH__ >= 800
// Position of 16 bytes of a row in a panel: these are permuted so that eight rows' are in different banks.
__device__ inline int swizzled(int row, int vec);

// The KV split `split` of a sequence, of at most `most`; fill: splits that find a multiprocessor idle.
struct Span {
    int count, start, stop;  // splits of the sequence; this one's tokens

    __device__ Span(int length, int split, int most, int fill) {
        const int tiles = (length + TILE - 1) / TILE, wanted = max((length + SPLIT / 2) / SPLIT, min(tiles, fill));
        const int each = max((tiles + max(min(wanted, most), 1) - 1) / max(min(wanted, most), 1), 1) * TILE;
        count = max((length + each - 1) / each, 1);
        start = split * each, stop = min(start + each, length);
    }
    __device__ int tiles() const { return (stop - start + TILE - 1) / TILE; }
};

// Writes the result of a sequence without tokens, for so many heads.
__device__ inline void store_zeros(T* to, int heads) {
    grid_wait();
    launch_dependents();
    for (int i = threadIdx.x; i < heads * LATENT / 8; i += THREADS) ((uint4*)to)[i] = make_uint4(0, 0, 0, 0);
}

// The softmax of two heads so far, one for each 16 lanes of a warp.
struct SoftmaxState {
    float top = MINUS_INFINITY, sum = 0;  // the head's; this lane's

    __device__ static int head() { return threadIdx.x / 16; }
    // Factor for a head's values, and the logarithm of its sum.
    __device__ void finish(float* inverse, float* logarithm) {
#pragma unroll
        for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 16 == 0) inverse[head()] = 1 / sum, logarithm[head()] = top + log2f(sum);
    }
};

// The second matmul: values by weights.
//
// Values of 16 heads and this warp's columns: of each 8 of them rows lane / 4 and 8 below, columns lane % 4 * 2 and the
// next. With FP8 the even ones of each 16 columns are in one 8 and the odd ones in the next.
struct Values {
    float o[COLUMNS / 8][4];

    __device__ void scale(const float* by) {
        const float upper = by[threadIdx.x % 32 / 4], lower = by[threadIdx.x % 32 / 4 + 8];
        if (FP8 && !__any_sync(~0u, upper != 1 || lower != 1)) return;  // instructions are short there, in 16 bits they are not
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            o[n][0] *= upper, o[n][1] *= upper, o[n][2] *= lower, o[n][3] *= lower;
    }
    // weights: 16 heads' of a panel's tokens
    __device__ void add_panel(unsigned weights, unsigned panel) {
        const int row = threadIdx.x % 16;
        unsigned p[4];
        load_weights(p, weights);
        if (FP8)
            add_codes(p, panel + codes_at(0), panel + codes_at(1));
        else
            add_elements(p, panel + threadIdx.x / 32 * COLUMNS * 2, row);
    }
    __device__ static void load_weights(unsigned (&p)[4], unsigned weights) {
        ldmatrix(p, weights + threadIdx.x % 16 * WEIGHTS_ROW + threadIdx.x % 32 / 16 * 16);
    }
    // Position of this lane's row of this warp's columns in a panel: of the first 32 or of the others.
    __device__ static int codes_at(int m) {
        return swizzled(threadIdx.x % 16, threadIdx.x / 32 * (COLUMNS / 16) + m * 2 + threadIdx.x % 32 / 16);
    }
    __device__ void add_elements(const unsigned (&p)[4], unsigned panel, int row) {
#pragma unroll
        for (int m = 0; m < COLUMNS / 16; m++) {
            unsigned y[4];
            ldmatrix_transposed(y, panel + swizzled(row, m * 2 + threadIdx.x % 32 / 16));
            mma<Operand>(o[2 * m], p, y[0], y[1]);
            mma<Operand>(o[2 * m + 1], p, y[2], y[3]);
        }
    }
    __device__ void add_codes(const unsigned (&p)[4], unsigned first, unsigned second) {
#pragma unroll
        for (int m = 0; m < COLUMNS / 32; m++) {
            unsigned y[4], even[4], odd[4];
            ldmatrix_transposed(y, m ? second : first);
#pragma unroll
            for (int i = 0; i < 4; i++) e4m3x4_to_f16(__byte_perm(y[i], 0, 0x3120), even[i], odd[i]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma<Operand>(o[4 * m + 2 * i], p, even[2 * i], even[2 * i + 1]);
                mma<Operand>(o[4 * m + 2 * i + 1], p, odd[2 * i], odd[2 * i + 1]);
            }
        }
    }
    // to: [HEADS, LATENT], of the block's first head; the first `heads` are there.
    __device__ void store(T* to, int heads) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int lane = threadIdx.x % 32, head = lane / 4 + h * 8;
            T* const from = to + head * LATENT + threadIdx.x / 32 * COLUMNS;  // the warp's first column
#pragma unroll
            for (int m = 0; m < COLUMNS / 32; m++) {
                unsigned x[4];
                if (FP8) {  // of 16 columns, and of 16 more, four side by side
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float *even = o[4 * m + i / 2 * 2], *odd = o[4 * m + i / 2 * 2 + 1];
                        x[i] = pack<T>(even[2 * h + i % 2], odd[2 * h + i % 2]);
                    }
                    if (head >= heads) continue;
#pragma unroll
                    for (int i = 0; i < 2; i++) *(uint2*)(from + (2 * m + i) * 16 + lane % 4 * 4) = {x[2 * i], x[2 * i + 1]};
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) x[i] = pack<T>(o[4 * m + i][2 * h], o[4 * m + i][2 * h + 1]);
                    exchange_quads(x);
                    if (head < heads) *(uint4*)(from + (4 * m + lane % 4) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
                }
            }
        }
    }
};

// A part: means of values, and of this thread's two rows the logarithms of sums.
struct Part {
    Values mean;
    float weight[2];

    __device__ void store(float* to) const {
        const int thread = threadIdx.x, lane = thread % 32;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            const float* o = mean.o[n];
            ((float4*)to)[n * THREADS + thread] = make_float4(o[0], o[1], o[2], o[3]);
        }
        if (thread < 32 && lane % 4 == 0)
            for (int h = 0; h < 2; h++) to[ROWS * LATENT + lane / 4 + h * 8] = weight[h];
    }
    // All of `count` parts that lie `stride` parts from each other, this one the `mine`-th; in their order, whichever
    // has come last.
    __device__ void add_up(const float* parts, int count, int stride, int mine) {
        const int thread = threadIdx.x;
        float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0, 0};
        Values all = {};
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const float* const part = parts + i * stride * PART;
            Part next = *this;
            if (i != mine) {
#pragma unroll
                for (int h = 0; h < 2; h++) next.weight[h] = __ldcg(part + ROWS * LATENT + thread % 32 / 4 + h * 8);
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    const float4 y = __ldcg((const float4*)part + n * THREADS + thread);
                    float* const o = next.mean.o[n];
                    o[0] = y.x, o[1] = y.y, o[2] = y.z, o[3] = y.w;
                }
            }
            float old[2], by[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float best = fmaxf(top[h], next.weight[h]);
                old[h] = exp2_approx(top[h] - best), by[h] = exp2_approx(next.weight[h] - best);
                top[h] = best, sum[h] = sum[h] * old[h] + by[h];
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    all.o[n][j] = fmaf(all.o[n][j], old[j / 2], by[j / 2] * next.mean.o[n][j]);
        }
        const float by[2] = {1 / sum[0], 1 / sum[1]};
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) mean.o[n][j] = all.o[n][j] * by[j / 2];
#pragma unroll
        for (int h = 0; h < 2; h++) weight[h] = top[h] + log2f(sum[h]);
    }
};

// AT_ONCE neighbouring parts are added up by the block of them that is the last to be there, then AT_ONCE of these
// sums, and so on. Whether this block has all of the sequence in the end. arrived: as many counts as there may be
// parts, zero before and after: one for each sum, where its first part has its own and, as sums of sums share that, so
// many behind it.
__device__ inline bool add_up(Part& part, int split, int count, float* parts, int* arrived, int* latest) {
    for (int stride = 1, level = 0; count > 1; stride *= AT_ONCE, level++) {
        const int first = split / AT_ONCE * AT_ONCE, some = min(AT_ONCE, count - first);
        if (some > 1) {
            __syncthreads();  // all have read the weights that are overwritten
            part.store(parts + split * stride * PART);
            __syncthreads();
            if (threadIdx.x == 0) {
                int* const count = arrived + first * stride + level;
                *latest = add_one(count) == some - 1;
                if (*latest) *count = 0;
            }
            __syncthreads();
            if (!*latest) return false;
            part.add_up(parts + first * stride * PART, some, stride, split - first);
        }
        split /= AT_ONCE, count = (count + AT_ONCE - 1) / AT_ONCE;
    }
    return true;
}

#include TILES
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
mla_decode(const T* q, CACHE cache, const unsigned char* scales, const int* tables, const int* lengths, T* out,
           float* parts, int* arrived, int q_row, int table_row, int fill, float scale) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 memory[];
    const int b = blockIdx.x / GROUPS, head = blockIdx.x % GROUPS * ROWS, heads = min(HEADS - head, ROWS);
    const int split = blockIdx.y, most = gridDim.y;
    const Lane lane;
    const int length = __ldcg(lengths + b);
    const Span span(length, split, most, fill);
    T* const to = out + ((long long)b * HEADS + head) * LATENT;
    if (split >= span.count) return;
    if (length == 0) return store_zeros(to, heads);
    Part part = {};
    int* const latest = attend(part, q, q_row, cache, scales, tables, table_row, b, head, heads, length, span, scale,
                               memory, lane);
    const long long first = (long long)blockIdx.x * most;
    if (add_up(part, split, span.count, parts + first * PART, arrived + first, latest)) part.mean.store(to, heads);
#endif
}
