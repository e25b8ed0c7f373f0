// All of a layer's experts, with few routed tokens each, in one launch: at the speed at which weights are read, from
// sm_90 on.
//
// First h [routed, INNER], in the order of group.cu, = weight of the routed token * act(gate) * up of w13 [experts, 2
// INNER, HIDDEN] (gate over up) and x, of which routed token p has row p / TOP; without GATED = weight * act(up) of w13
// [experts, INNER, HIDDEN]. Then y [routed, HIDDEN], in the routed tokens' own order, of w2 [experts, HIDDEN, INNER] and
// h.
//
// An item is a tile of up to ROWS routed tokens of one expert and M outputs' weights; those of w13 come first. A block
// takes the item of its number, and then the next one that no block has taken. One warp has TMA bring chunks of KC inputs
// of these outputs, STAGES of them ahead and on into the next item; another one gathers the same inputs of the routed
// tokens; the others multiply both by tensor cores. Chunks lie in shared memory as in pipelined_gemm.cu: boxes of 64
// inputs and M / 2 outputs, whose 16-byte vectors are permuted in each row. Inputs past the last one are zeros. Outputs
// past the last one have weights of whatever comes next in memory or came before in the stage, and are not stored.
//
// Weights do not wait for each other's GEMM: only rows of h do, until `done` shows that all items of their tile are
// there. An item of w2 may wait for an item of w13 that another block has, so a block must not take one while blocks
// with a first item of their own have not started: with another process or stream on the GPU they may need this block's
// multiprocessor. A block therefore takes no second item before all have started. It waits PATIENCE for that and then
// ends early; the last block to start finds all others started and takes what is left. A first item of w2 waits for
// first items with lower numbers only, and multiprocessors start blocks in the order of their numbers.
// Behind the counts in `done` are `taken`, how many further items were taken, and `started` and `left`, the blocks that
// have. All are zero before the launch and after it.
//
// Weights do not wait for the router either. A block's first item is known beforehand if every expert has one tile, so
// that its first chunks are asked for before the kernel's predecessors have ended. If it is another item, what has come
// is overwritten. (To bring further chunks to the second-level cache gained nothing, items shared out beforehand lost
// 3 %: benchmarks/results/h100-moe-layers-2026-11-25.txt. docs/measurements/not-kept.md has what else was tried.)

constexpr int M = 128;                         // outputs' weights of an item
constexpr int ROWS = 8 * TILES;                // routed tokens of an item
constexpr int BOXES = KC / 64;                 // of a chunk
constexpr int STAGE = (M + ROWS) * KC * 2;     // bytes
constexpr int THREADS = M / 16 * 32;           // that multiply; two more warps bring what they need
constexpr int WIDE = ROWS + 1;
constexpr int QUEUE_DEPTH = 4;                 // items that one warp of a block may be ahead of another
constexpr int PATIENCE = 50'000;               // nanoseconds that a block waits for others to start
#include "tma.cuh"
#include "mma.cuh"
#include "smem_tile.cuh"
#include "tile_sums.cuh"

// -- The items that blocks take, and in which order.

template <bool UP_, int INPUTS_, int WIDTH_> struct Gemm {
    static constexpr bool UP = UP_, PAIRED = UP && GATED;  // PAIRED: gates and ups of the same outputs
    static constexpr int INPUTS = INPUTS_, WIDTH = WIDTH_;
    static constexpr int OUTPUTS = PAIRED ? 2 * WIDTH : WIDTH, OUTS = PAIRED ? M / 2 : M;
    static constexpr int BLOCKS = (WIDTH + OUTS - 1) / OUTS, CHUNKS = (INPUTS + KC - 1) / KC;  // of a tile, of an item
};
using Up = Gemm<true, HIDDEN, INNER>;
using Down = Gemm<false, INNER, HIDDEN>;
constexpr int EARLY = STAGES < Up::CHUNKS ? STAGES : Up::CHUNKS;  // chunks that are asked for before predecessors end

#if __CUDA_ARCH__ >= 900
struct Item {
    bool up;
    int tile, expert, block, start, rows;
};

// group.cu's tables, past the first-level cache, which another kernel may have filled before they were there.
struct Tiles {
    const int *offsets, *experts, *starts;
    int used;

    // Built by a warp, which counts the tiles that are needed.
    __device__ Tiles(const int* offsets, const int* experts, const int* starts, int most)
        : offsets(offsets), experts(experts), starts(starts), used(0) {
        for (int i = threadIdx.x % 32; i < most; i += 32) used += __ldcg(experts + i) >= 0;
#pragma unroll
        for (int step = 16; step; step >>= 1) used += __shfl_xor_sync(0xffffffffu, used, step);
    }

    __device__ int items() const { return used * (Up::BLOCKS + Down::BLOCKS); }
    __device__ Item find(int number) const {
        const int ups = used * Up::BLOCKS;
        Item item;
        item.up = number < ups;
        item.tile = item.up ? number / Up::BLOCKS : (number - ups) / Down::BLOCKS;
        item.block = item.up ? number % Up::BLOCKS : (number - ups) % Down::BLOCKS;
        item.expert = __ldcg(experts + item.tile), item.start = __ldcg(starts + item.tile);
        item.rows = min(ROWS, __ldcg(offsets + item.expert + 1) - item.start);
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

struct Ring {
    unsigned at;
    Barrier *full, *empty, *early;

    __device__ void wait_for_room(int n) const {
        if (n >= STAGES) mbarrier_wait(empty + n % STAGES, n / STAGES - 1);
    }
};

__device__ inline void init_barriers(const Ring& ring, const Queue& queue) {
    for (int s = 0; s < STAGES; s++) {
        mbarrier_init(ring.full + s, 1 + 32);  // TMA's and those of the warp that gathers
        mbarrier_init(ring.empty + s, THREADS / 32);
        mbarrier_init(ring.early + s, 1);
    }
    for (int t = 0; t < QUEUE_DEPTH; t++) {
        mbarrier_init(queue.posted + t, 1);
        mbarrier_init(queue.read + t, THREADS / 32 + 1);
    }
    fence_mbarrier_init();
}

// Requests a chunk's weights: the second half of the outputs unless all of it is past the last one.
template <class G> struct Boxes {
    const TensorMap* map;
    int row;
    bool both;

    __device__ Boxes(const TensorMap* map, int expert, int block)
        : map(map), row(expert * G::OUTPUTS + block * G::OUTS), both(G::PAIRED || block * M + M / 2 < G::WIDTH) {}
    __device__ void load(int chunk, unsigned to, Barrier* barrier) const {
        mbarrier_expect(barrier, (both ? M : M / 2) * KC * 2);
#pragma unroll
        for (int b = 0; b < BOXES; b++, to += M * 128) {
            tma_load(to, map, chunk * KC + b * 64, row, barrier);
            if (both) tma_load(to + M / 2 * 128, map, chunk * KC + b * 64, row + (G::PAIRED ? G::WIDTH : M / 2), barrier);
        }
    }
};

// One thread: an item's weights; n chunks came before. there: chunks that are under way to the stages of their numbers,
// as `early` will tell.
template <class G>
__device__ inline void bring_weights(const TensorMap* of_w, const Item& item, const Ring& ring, int there, int& n) {
    const Boxes<G> boxes(of_w, item.expert, item.block);
    for (int c = 0; c < G::CHUNKS; c++, n++) {
        const int stage = n % STAGES;
        ring.wait_for_room(n);
        if (n < there) {
            mbarrier_wait(ring.early + n, 0);
            mbarrier_arrive(ring.full + n);
        } else {
            boxes.load(c, ring.at + stage * STAGE, ring.full + stage);
        }
    }
}

// One warp: an item's rows of x, of which this lane knows `mine`. Where rows that the item lacks would be, the stage
// stays as it is: their sums are not stored.
template <class G>
__device__ inline void bring_rows(const T* x, int mine, int rows, const Ring& ring, int& n) {
    constexpr int VECS = KC / 8;  // of a row
    const int lane = threadIdx.x % 32;
    for (int c = 0; c < G::CHUNKS; c++, n++) {
        const int stage = n % STAGES;
        ring.wait_for_room(n);
        const unsigned to = ring.at + stage * STAGE + BOXES * M * 128;
#pragma unroll
        for (int i = 0; i < ROWS * VECS / 32; i++) {
            const int r = (i * 32 + lane) / VECS, vec = (i * 32 + lane) % VECS;
            if (i * 32 / VECS >= rows) break;
            const T* row = x + (long long)__shfl_sync(0xffffffffu, mine, r) * G::INPUTS + c * KC;
            const bool there = r < rows && (G::INPUTS % KC == 0 || c * KC + vec * 8 < G::INPUTS);
            copy_async16(to + (vec / 8 * ROWS + r) * 128 + (vec % 8 ^ r % 8) * 16, row + vec * 8, there);
        }
        arrive_when_copied(ring.full + stage);
    }
}

// An item's values, once all sums are there. Lanes have their rows' routed tokens and weights. A warp's elements are of
// one row.
template <class G>
__device__ inline void store(const float* sums, const Item& item, int routed, float weights, T* y) {
    for (int i = threadIdx.x; i < item.rows * G::OUTS; i += THREADS) {
        const int row = i / G::OUTS, out = i % G::OUTS;
        const int at = item.block * G::OUTS + out;
        const long long to = G::UP ? item.start + row : __shfl_sync(0xffffffffu, routed, row);
        float value = sums[out * WIDE + row];
        if constexpr (G::UP)
            value = gated<T, ACT>(value, GATED ? sums[(M / 2 + out) * WIDE + row] : 1) * __shfl_sync(0xffffffffu, weights, row);
        if (G::WIDTH % G::OUTS == 0 || at < G::WIDTH) y[to * G::WIDTH + at] = from_float<T>(value);
    }
}

// The warps that multiply: an item, of which they compute N times 8 rows.
template <class G, int N>
__device__ inline void multiply_rows(const Item& item, const TileLane& place, const Ring& ring, float* sums,
                                     const int* sorted_ids, const float* weights, T* y, int& n) {
    const int lane = threadIdx.x % 32;
    float sum[1][N][4] = {}, mine = 0;
    const int routed_id = lane < item.rows ? __ldcg(sorted_ids + item.start + lane) : 0;
    if (G::UP) mine = __ldcg(weights + routed_id);
#pragma unroll 1
    for (const int start = n, end = n + G::CHUNKS; n < end; n++) {
        const int stage = n % STAGES;
        mbarrier_wait(ring.full + stage, n / STAGES);
        // The chunk before has been multiplied, so its stage has been read.
        if (n > start && lane == 0) mbarrier_arrive(ring.empty + (n - 1) % STAGES);
#pragma unroll
        for (int i = 0; i < KC / 16; i++) multiply_step(sum[0], place, stage, i);
    }
    release_stage(ring.empty + (n - 1) % STAGES);
    keep_sums<WIDE>(sum, sums + (threadIdx.x / 32 * 16 + lane / 4) * WIDE + lane % 4 * 2);
    block_sync<THREADS>(1);
    store<G>(sums, item, routed_id, mine, y);
    block_sync<THREADS>(1);  // all is stored, and sums may be overwritten
}

template <class G>
__device__ inline void multiply(const Item& item, const TileLane& place, const Ring& ring, float* sums, const int* sorted_ids,
                                const float* weights, T* y, int& n) {
    constexpr int FEWER = TILES > 1 ? TILES / 2 : 1;
    if (TILES > 1 && item.rows <= 8 * FEWER)
        multiply_rows<G, FEWER>(item, place, ring, sums, sorted_ids, weights, y, n);
    else
        multiply_rows<G, TILES>(item, place, ring, sums, sorted_ids, weights, y, n);
}

// The first chunks of a block's first item, if every expert has one tile; whether they are asked for.
__device__ inline bool ask_early(const TensorMap* of_w13, const Ring& ring, int experts) {
    const int likely = blockIdx.x / Up::BLOCKS;
    if (likely >= experts) return false;
    if (elected()) {
        const Boxes<Up> boxes(of_w13, likely, blockIdx.x % Up::BLOCKS);
        for (int c = 0; c < EARLY; c++) boxes.load(c, ring.at + c * STAGE, ring.early + c);
    }
    __syncwarp();
    return true;
}

// Counts of all blocks.
struct BlockCounts {
    int *taken, *started, *left;

    // One thread, as the last thing that its block does with these: the last block clears them.
    __device__ void leave() const {
        __threadfence();
        if (atomicAdd(left, 1) == (int)gridDim.x - 1) *taken = 0, *started = 0, *left = 0;
    }
};

// The warp that asks for weights.
__device__ inline void weights_warp(const TensorMap* w13, const TensorMap* w2, const Tiles& tiles, const Ring& ring,
                                    const Queue& queue, const BlockCounts& blocks, bool guessed) {
    if (!elected()) return;
    atomicAdd(blocks.started, 1);
    const int items = tiles.items();
    bool all_started = false;
    int number = blockIdx.x, n = 0;
    bool right = false;
    if (guessed && number < items) {
        // An item of w2 where few tiles are needed, maybe of the same expert.
        const Item first = tiles.find(number);
        right = first.up && first.expert == (int)blockIdx.x / Up::BLOCKS;
    }
    if (guessed && !right)
        for (int c = 0; c < EARLY; c++) mbarrier_wait(ring.early + c, 0);
    for (int k = 0;; k++) {
        queue.post(k, number);
        if (number >= items) break;
        const Item item = tiles.find(number);
        int before = all_started ? atomicAdd(blocks.taken, 1) : 0;  // not awaited before this item's weights are asked for
        if (item.up)
            bring_weights<Up>(w13, item, ring, right ? EARLY : 0, n);
        else
            bring_weights<Down>(w2, item, ring, 0, n);
        if (!all_started) {
            all_started = wait_briefly_for_count(blocks.started, gridDim.x, PATIENCE);
            before = all_started ? atomicAdd(blocks.taken, 1) : items;
        }
        number = gridDim.x + before;
    }
    blocks.leave();
}

// One warp: until a tile's rows of h are there. The last of its items of w2 clears their count.
__device__ inline void wait_for_rows(int* count) {
    wait_for_count(count, Up::BLOCKS);
    __syncwarp();  // all lanes have seen the count that the last warp to see it clears
    if (threadIdx.x % 32 == 0 && atomicAdd(count, 1) == Up::BLOCKS + Down::BLOCKS - 1) *count = 0;
}

// The warp that gathers rows.
__device__ inline void rows_warp(const T* x, const T* h, const int* sorted_ids, const Tiles& tiles, const Ring& ring,
                                 const Queue& queue, int* done) {
    const int lane = threadIdx.x % 32, items = tiles.items();
    for (int k = 0, n = 0;; k++) {
        const int number = queue.get(k);
        if (number >= items) break;
        const Item item = tiles.find(number);
        const int mine = item.start + (lane < item.rows ? lane : 0);
        if (item.up) {
            bring_rows<Up>(x, __ldcg(sorted_ids + mine) / TOP, item.rows, ring, n);
        } else {
            wait_for_rows(done + item.tile);
            bring_rows<Down>(h, mine, item.rows, ring, n);
        }
    }
    wait_for_copies();
}

// The warps that multiply.
__device__ inline void multiply_warps(const Tiles& tiles, const Ring& ring, const Queue& queue, float* sums, const int* sorted_ids,
                                      const float* weights, T* h, T* y, int* done) {
    const TileLane place(ring.at, threadIdx.x / 32, threadIdx.x % 32);
    const int items = tiles.items();
    for (int k = 0, n = 0;; k++) {
        const int number = queue.get(k);
        if (number >= items) break;
        const Item item = tiles.find(number);
        if (item.up)
            multiply<Up>(item, place, ring, sums, sorted_ids, weights, h, n);
        else
            multiply<Down>(item, place, ring, sums, sorted_ids, weights, y, n);
        if (item.up && threadIdx.x == 0) {  // rows of the second GEMM are stored, by threads that have met
            __threadfence();
            atomicAdd(done + item.tile, 1);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
expert_mlp(const T* x, const __grid_constant__ TensorMap w13, const __grid_constant__ TensorMap w2, const int* sorted_ids,
           const int* offsets, const int* tile_expert, const int* tile_start, const float* weights, T* h, T* y, int* done, int most,
           int experts) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES], early[STAGES], posted[QUEUE_DEPTH], read[QUEUE_DEPTH];
    __shared__ int numbers[QUEUE_DEPTH];
    const unsigned start = (smem_address(memory) + 1023) / 1024 * 1024;
    float* sums = (float*)((char*)memory + (start - smem_address(memory)) + STAGES * STAGE);
    const int warp = threadIdx.x / 32;
    const BlockCounts blocks{done + most, done + most + 1, done + most + 2};
    const Ring ring{start, full, empty, early};
    const Queue queue{numbers, posted, read};
    if (threadIdx.x == 0) init_barriers(ring, queue);
    __syncthreads();
    const bool guessed = warp == THREADS / 32 && ask_early(&w13, ring, experts);
    grid_wait();
    const Tiles tiles(offsets, tile_expert, tile_start, most);
    if (warp == THREADS / 32) {
        weights_warp(&w13, &w2, tiles, ring, queue, blocks, guessed);
        return;
    }
    if (warp > THREADS / 32) {
        launch_dependents();
        rows_warp(x, h, sorted_ids, tiles, ring, queue, done);
        return;
    }
    multiply_warps(tiles, ring, queue, sums, sorted_ids, weights, h, y, done);
#endif
}
