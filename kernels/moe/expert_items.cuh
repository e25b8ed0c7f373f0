// The items that expert_mlp.cu's blocks take, and in which order.

// A GEMM: of an item ROWS_ rows of x, and of a chunk KC_ inputs.
template <bool GATED_, int INPUTS_, int WIDTH_, int ROWS_ = ROWS, int KC_ = KC> struct Gemm {
    static constexpr bool GATED = GATED_, SHARES = ROWS_ == SHARED_ROWS;
    static constexpr int INPUTS = INPUTS_, WIDTH = WIDTH_, ROWS = ROWS_, KC = KC_, BOXES = KC / 64;
    static constexpr int OUTPUTS = GATED ? 2 * WIDTH : WIDTH, OUTS = GATED ? M / 2 : M;
    static constexpr int BLOCKS = WIDTH / OUTS, CHUNKS = INPUTS / KC;  // of a tile, of an item
};
using Up = Gemm<true, HIDDEN, INNER>;
using Down = Gemm<false, INNER, HIDDEN>;
using SharedUp = Gemm<true, HIDDEN, SHARED_INNER, SHARED_ROWS, 64>;  // a stage has room for so many inputs of all rows
using SharedDown = Gemm<false, SHARED_INNER, HIDDEN, SHARED_ROWS, 64>;
static_assert(!SHARED_INNER || (M + SHARED_ROWS) * 64 * 2 <= STAGE, "a chunk of shared experts is larger than a stage");
static_assert(ROWS < SHARED_ROWS, "lanes know the rows of an item of routed experts");

#if __CUDA_ARCH__ >= 900
#include "expert_tiles.cuh"

struct Item {
    bool up, shared;
    int tile, expert, block, start, rows;  // shared experts' have neither tile nor expert nor start

    __device__ static Item of_shared_experts(bool up, int block, int tokens) { return {up, true, 0, -1, block, 0, tokens}; }
};

constexpr int MOST_TILES = EXPERTS + SORTED_PAIRS / ROWS;  // of as many pairs as a block sorts

// As group.cu leaves it, in a block's shared memory.
struct Sorted {
    int order[SORTED_PAIRS + 1], ends[EXPERTS + 1], experts[MOST_TILES + 1], starts[MOST_TILES + 1];
};

// A warp: from how many pairs of each expert each warp has, in `counts`, to where each warp's begin among the expert's.
__device__ inline void cut_tiles(int (*counts)[EXPERTS + 1], Sorted& to) {
    const int lane = threadIdx.x % 32;
    const Totals all = place_experts(
        [=](int e) {
            int n = 0;
            for (int w = 0; w < THREADS / 32; w++) {
                const int mine = counts[w][e];
                counts[w][e] = n, n += mine;
            }
            return n;
        },
        [&](int e, int start, int tile, int tiles) {
            to.ends[e] = start;
            for (int i = 0; i < tiles; i++) to.experts[tile + i] = e, to.starts[tile + i] = start + i * ROWS;
        });
    if (lane == 0) to.ends[EXPERTS] = all.pairs;
    for (int i = all.tiles + lane; i < MOST_TILES; i += 32) to.experts[i] = -1;
}

// A block: what group.cu does, without a launch and without asking the second-level cache for each item. Pairs of one expert
// stay in their order, as all blocks must find the same. counts: zeros.
__device__ inline void sort_pairs(const int* ids, int pairs, int (*counts)[EXPERTS + 1], Sorted& to) {
    constexpr int EACH = SORTED_PAIRS / THREADS + !SORTED_PAIRS;
    static_assert(SORTED_PAIRS % THREADS == 0, "all pairs have a thread");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * EACH * 32 + lane;
    int expert[EACH], rank[EACH];
    if (warp < THREADS / 32) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const unsigned id = first + j * 32 < pairs ? __ldcg(ids + first + j * 32) : EXPERTS;
            expert[j] = id < EXPERTS ? id : EXPERTS;  // as group.cu leaves out what is no expert
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {  // pairs past the last one are of an expert past the last one
            const unsigned same = __match_any_sync(0xffffffffu, expert[j]), earlier = same & ((1u << lane) - 1);
            rank[j] = counts[warp][expert[j]] + __popc(earlier);
            __syncwarp();
            if (!earlier) counts[warp][expert[j]] += __popc(same);
            __syncwarp();
        }
    }
    __syncthreads();
    if (warp == 0) cut_tiles(counts, to);
    __syncthreads();
    if (warp < THREADS / 32)
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (expert[j] < EXPERTS) to.order[to.ends[expert[j]] + counts[warp][expert[j]] + rank[j]] = first + j * 32;
    __syncthreads();
}

// An entry of the tables: group.cu's past the first-level cache, which another kernel may have filled before they were there.
__device__ inline int load_index(const int* from) { return SORTED_PAIRS ? *from : __ldcg(from); }

struct Tiles {
    const int *ends, *experts, *starts;
    int used, tokens;

    // By a warp, which counts the tiles that are needed.
    __device__ Tiles(const int* ends, const int* experts, const int* starts, int most, int tokens)
        : ends(ends), experts(experts), starts(starts), used(0), tokens(tokens) {
        for (int i = threadIdx.x % 32; i < most; i += 32) used += load_index(experts + i) >= 0;
#pragma unroll
        for (int step = 16; step; step >>= 1) used += __shfl_xor_sync(0xffffffffu, used, step);
    }

    __device__ int items() const {
        return used * (Up::BLOCKS + Down::BLOCKS) + (SHARED_INNER ? SharedUp::BLOCKS + SharedDown::BLOCKS : 0);
    }
    __device__ Item find(int number) const {
        const int ups = used * Up::BLOCKS;
        if (SHARED_INNER) {
            const int first = min((int)gridDim.x, ups);
            if (number >= first && number < first + SharedUp::BLOCKS)
                return Item::of_shared_experts(true, number - first, tokens);
            if (number >= first) number -= SharedUp::BLOCKS;
            if (number >= ups && number < ups + SharedDown::BLOCKS)
                return Item::of_shared_experts(false, number - ups, tokens);
            if (number >= ups) number -= SharedDown::BLOCKS;
        }
        Item item;
        item.shared = false;
        item.up = number < ups;
        item.tile = item.up ? number / Up::BLOCKS : (number - ups) / Down::BLOCKS;
        item.block = item.up ? number % Up::BLOCKS : (number - ups) % Down::BLOCKS;
        item.expert = load_index(experts + item.tile), item.start = load_index(starts + item.tile);
        item.rows = min(ROWS, load_index(ends + item.expert + 1) - item.start);
        return item;
    }
};

// The numbers of a block's items, from the thread that asks for weights to the other warps.
struct Queue {
    volatile int* numbers;
    Barrier *posted, *read;

    __device__ void post(int k, int number) const {
        if (k >= QUEUE_DEPTH) mbarrier_wait(read + k % QUEUE_DEPTH, k / QUEUE_DEPTH - 1);
        numbers[k % QUEUE_DEPTH] = number;
        mbarrier_arrive(posted + k % QUEUE_DEPTH);
    }
    __device__ int get(int k) const {
        mbarrier_wait(posted + k % QUEUE_DEPTH, k / QUEUE_DEPTH);
        const int number = numbers[k % QUEUE_DEPTH];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(read + k % QUEUE_DEPTH);
        return number;
    }
};
#endif
