// The topk largest of each token's scores, of equal ones the first, as cache slots in the order of their positions: a
// block for each token. A radix select: three passes over the scores count digits of BITS bits, from the highest on,
// and leave the least score that is chosen; a fourth one writes. NaNs and both zeros are equal.
//
// scores [tokens, scores_row] f32, of which the first seen [tokens] are there, where they are more than topk. tables
// [sequences, table_row]: block tables, of query_len tokens each. slots [tokens, topk], counts [tokens].
constexpr int BITS = 11, BINS = 1 << BITS, EACH = 4, WARPS = THREADS / 32, EVERY = THREADS * EACH;
constexpr int AHEAD = 8;  // scores that a thread asks for at once: one after the other, a pass waits for each
static_assert(BINS == 2 * THREADS && WARPS == 32, "a thread looks at two bins, a warp at all warps' sums");

// A score as an unsigned number of the same order.
__device__ inline unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x == x ? x + 0.0f : 0.0f);  // -0.0 + 0.0 is 0.0
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// The sum of x over the threads before this one, and over `all`. sums: [WARPS] in shared memory.
__device__ inline int scan(int x, int* sums, int& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
    }
    __syncthreads();  // the sums of the last scan have been read
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int others = sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, others, step);
        if (lane >= step) others += before;
    }
    all = __shfl_sync(~0u, others, 31);
    const int before = __shfl_sync(~0u, others, max(warp - 1, 0));
    return (warp ? before : 0) + sum - x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
topk_select(const float* scores, const int* tables, const int* seen, int* slots, int* counts, int query_len, int topk,
            int scores_row, int table_row, int block_size) {
    __shared__ int bins[BINS], sums[WARPS], found[2];
    grid_wait();
    const int token = blockIdx.x, length = seen[token];
    const int* const table = tables + (long long)(token / query_len) * table_row;
    int* const to = slots + (long long)token * topk;
    scores += (long long)token * scores_row;
    const auto slot = [&](int i) { return table[i / block_size] * block_size + i % block_size; };
    if (threadIdx.x == 0) counts[token] = min(length, topk);
    if (length <= topk) {
        for (int i = threadIdx.x; i < length; i += THREADS) to[i] = slot(i);
        return;
    }
    unsigned least = 0;  // of the chosen scores, as far as its digits are known
    int lacking = topk;  // scores that have these digits and are chosen
#pragma unroll
    for (int pass = 0; pass < 3; pass++) {
        constexpr int HIGHEST = 32 - BITS;
        const int shift = pass == 2 ? 0 : HIGHEST - pass * BITS, above = pass == 2 ? HIGHEST - BITS : shift + BITS;
        const unsigned mask = (pass == 2 ? 1u << (HIGHEST - BITS) : (unsigned)BINS) - 1;
        for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (int from = threadIdx.x; from < length; from += THREADS * AHEAD) {
            unsigned x[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) x[j] = ordered(from + j * THREADS < length ? scores[from + j * THREADS] : 0);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (from + j * THREADS < length && (pass == 0 || x[j] >> above == least >> above))
                    atomicAdd(bins + (x[j] >> shift & mask), 1);
        }
        __syncthreads();
        // Two bins a thread, from the largest digit on: in one of them the last of the lacking scores lies.
        const int high = BINS - 1 - 2 * threadIdx.x, first = bins[high], second = bins[high - 1];
        int all, before = scan(first + second, sums, all);
        if (before < lacking && lacking <= before + first + second) {
            const bool in_first = lacking <= before + first;
            found[0] = in_first ? high : high - 1, found[1] = lacking - before - (in_first ? 0 : first);
        }
        __syncthreads();
        least |= (unsigned)found[0] << shift, lacking = found[1];
    }
    int larger = 0, equal = 0;  // scores before this thread's, of those above the least one, and of its equals
    for (int from = 0; from < length && larger + min(equal, lacking) < topk; from += EVERY) {
        const int start = from + threadIdx.x * EACH;
        unsigned x[EACH];
        int mine = 0, all;  // larger ones in the upper half
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            x[j] = start + j < length ? ordered(scores[start + j]) : 0;
            if (start + j < length) mine += x[j] > least ? 1 << 16 : x[j] == least;
        }
        const int before = scan(mine, sums, all);
        int above = larger + (before >> 16), level = equal + (before & 0xffff);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (start + j >= length || x[j] < least) continue;
            const bool larger_one = x[j] > least;
            if (larger_one || level < lacking) to[above + min(level, lacking)] = slot(start + j);
            above += larger_one, level += !larger_one;
        }
        larger += all >> 16, equal += all & 0xffff;
    }
}
