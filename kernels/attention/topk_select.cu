// The topk largest of each token's scores, of equal ones the first, as cache slots in the order of their positions. A
// cluster of BLOCKS blocks takes a token, each block a share of its positions. A radix select: up to three passes over the
// scores count digits of BITS bits, from the highest on, and leave the least score that is chosen; then each warp writes
// those of its positions. NaNs and both zeros are equal.
//
// Scores are read from global memory once: a block keeps the first `kept` of its share in shared memory, ready to be
// compared. Blocks read each other's counts there, of groups of digits first, and meet once in each pass.
//
// scores [tokens, scores_row] f32, of which the first seen [tokens] are there, where they are more than topk. tables
// [sequences, table_row]: block tables, of query_len tokens each. slots [tokens, topk], counts [tokens].
#include "tma.cuh"

constexpr int BITS = 11, PASSES = 3, BINS = 1 << BITS, GROUP = 16, GROUPS = BINS / GROUP, WARPS = THREADS / 32;
constexpr int AHEAD = 8;  // scores that a thread asks for at once: one after the other, a pass waits for each
static_assert(BINS == 2 * THREADS && WARPS == 32, "a thread adds up two bins, a warp looks at all warps' sums");

// A digit, among counts from the largest on: where the `lacking`-th score lies that is still to be chosen.
struct Found {
    int digit, lacking;  // scores with this digit that are chosen
    int count;           // all scores with this digit
    int larger, equal;   // of the blocks before this one, scores with larger digits, and with this one
};

struct Shared {
    int bins[PASSES][BINS], groups[PASSES][GROUPS];  // how many scores have each digit
    int larger[WARPS], equal[WARPS];                 // of each warp's positions
    Found found;
    int unused[3];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "topk_select.py reckons with another layout of shared memory");

// A score as an unsigned number of the same order, never zero.
__device__ inline unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x == x ? x + 0.0f : 0.0f);  // -0.0 + 0.0 is 0.0
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

__device__ inline void meet() {
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        __syncwarp();  // all of a warp come to a cluster's barrier together
        cluster_sync();
        return;
    }
#endif
    __syncthreads();
}
// Four counts of a block of the cluster.
__device__ inline void load_counts(int (&x)[4], const int* from, int block) {
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        const float4 y = load_from_block(smem_address(from), block);
        x[0] = __float_as_uint(y.x), x[1] = __float_as_uint(y.y), x[2] = __float_as_uint(y.z), x[3] = __float_as_uint(y.w);
    } else
#endif
    {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = from[i];
    }
}

// Found among 4 * LANES counts of all blocks, by a warp.
template <int LANES> __device__ inline Found find(const int* counts, int rank, int lacking) {
    const int lane = threadIdx.x % 32, first = (LANES - 1 - lane) * 4;
    int all[4] = {}, earlier[4] = {}, x[BLOCKS][4];
    if (lane < LANES) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) load_counts(x[block], counts + first, block);
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < 4; i++) all[i] += x[block][i], earlier[i] += block < rank ? x[block][i] : 0;
    }
    const int sum = all[0] + all[1] + all[2] + all[3];
    int before = sum;  // those of larger digits
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const int others = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += others;
    }
    before -= sum;
    Found found = {};
    bool here = false;
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        if (before < lacking && lacking <= before + all[i])
            here = true, found = Found{first + i, lacking - before, all[i], 0, earlier[i]};
        before += all[i];
    }
    const int from = __ffs(__ballot_sync(~0u, here)) - 1;
    found.digit = __shfl_sync(~0u, found.digit, from), found.lacking = __shfl_sync(~0u, found.lacking, from);
    found.count = __shfl_sync(~0u, found.count, from), found.equal = __shfl_sync(~0u, found.equal, from);
    int larger = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) larger += first + i > found.digit ? earlier[i] : 0;
    found.larger = __reduce_add_sync(~0u, larger);
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS)
topk_select(const float* scores, const int* tables, const int* seen, int* slots, int* counts, int query_len, int topk,
            int scores_row, int table_row, int block_size, int kept) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    unsigned* const keys = (unsigned*)(&shared + 1);
    for (int i = threadIdx.x; i < PASSES * BINS; i += THREADS) shared.bins[0][i] = 0;
    __syncthreads();
    grid_wait();
    const int rank = blockIdx.x % BLOCKS, token = blockIdx.x / BLOCKS, length = seen[token];
    const int* const table = tables + (long long)(token / query_len) * table_row;
    int* const to = slots + (long long)token * topk;
    if (rank == 0 && threadIdx.x == 0) counts[token] = min(length, topk);
    if (length <= topk) {
        for (int i = rank * THREADS + threadIdx.x; i < length; i += BLOCKS * THREADS)
            to[i] = table[i / block_size] * block_size + i % block_size;
        return;
    }
    const int share = (length + BLOCKS - 1) / BLOCKS, first = rank * share, count = min(share, length - first);
    scores += (long long)token * scores_row + first;

    unsigned least = 0;         // of the chosen scores, as far as its digits are known
    int lacking = topk;         // scores that have these digits and are chosen
    int larger = 0, equal = 0;  // scores before this block's that are larger than `least`, and equal ones
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        constexpr int HIGHEST = 32 - BITS;
        const int shift = pass == 2 ? 0 : HIGHEST - pass * BITS, above = pass == 2 ? HIGHEST - BITS : shift + BITS;
        const unsigned mask = (pass == 2 ? 1u << (HIGHEST - BITS) : (unsigned)BINS) - 1;
        int* const bins = shared.bins[pass];
        for (int from = threadIdx.x; from < count; from += THREADS * AHEAD) {
            unsigned x[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int i = from + j * THREADS;
                x[j] = i >= count ? 0 : pass && i < kept ? keys[i] : ordered(scores[i]);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int i = from + j * THREADS;
                if (pass == 0 && i < min(count, kept)) keys[i] = x[j];
                if (i < count && (pass == 0 || x[j] >> above == least >> above)) atomicAdd(bins + (x[j] >> shift & mask), 1);
            }
        }
        __syncthreads();
        int sum = bins[2 * threadIdx.x] + bins[2 * threadIdx.x + 1];
#pragma unroll
        for (int step = 1; step < GROUP / 2; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % (GROUP / 2) == 0) shared.groups[pass][threadIdx.x / (GROUP / 2)] = sum;
        meet();
        if (threadIdx.x < 32) {
            const Found group = find<GROUPS / 4>(shared.groups[pass], rank, lacking);
            Found found = find<GROUP / 4>(bins + group.digit * GROUP, rank, group.lacking);
            found.digit += group.digit * GROUP, found.larger += group.larger;
            if (threadIdx.x == 0) shared.found = found;
        }
        __syncthreads();
        const Found found = shared.found;
        least |= (unsigned)found.digit << shift, lacking = found.lacking, larger += found.larger, equal = found.equal;
        if (found.count == lacking) {  // all of these are chosen: no further digit matters
            least--, lacking = 0, larger += equal;
            break;
        }
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int each = (count + THREADS - 1) / THREADS * 32, begin = warp * each, end = min(begin + each, count);
    int mine = 0, level = 0;
    for (int i = begin + lane; i < end; i += 32) {
        const unsigned x = i < kept ? keys[i] : ordered(scores[i]);
        mine += x > least, level += x == least;
    }
    mine = __reduce_add_sync(~0u, mine), level = __reduce_add_sync(~0u, level);
    if (lane == 0) shared.larger[warp] = mine, shared.equal[warp] = level;
    __syncthreads();
    larger += __reduce_add_sync(~0u, lane < warp ? shared.larger[lane] : 0);
    equal += __reduce_add_sync(~0u, lane < warp ? shared.equal[lane] : 0);
    for (int from = begin; from < end; from += 32 * AHEAD) {
        unsigned x[AHEAD];
        int block[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int i = from + j * 32 + lane;
            x[j] = i >= end ? 0 : i < kept ? keys[i] : ordered(scores[i]);
            block[j] = x[j] < least || i >= end ? 0 : table[(first + i) / block_size];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int i = first + from + j * 32 + lane;
            const unsigned before = (1u << lane) - 1, over = __ballot_sync(~0u, x[j] > least);
            const unsigned same = __ballot_sync(~0u, x[j] == least);
            const int above = larger + __popc(over & before), at = equal + __popc(same & before);
            if (x[j] > least || (x[j] == least && at < lacking))
                to[above + min(at, lacking)] = block[j] * block_size + i % block_size;
            larger += __popc(over), equal += __popc(same);
        }
    }
    if (BLOCKS > 1) meet();  // others may still read this block's counts
}
