// All of a layer's experts, of few pairs each, in one launch: at the speed at which weights are read, from sm_90 on.
//
// First h [pairs, INNER], in the order of group.cu, = weight of the pair * act(gate) * up of w13 [experts, 2 INNER, HIDDEN]
// (gate over up) and x, of which pair p has row p / TOP. Then y [pairs, HIDDEN], in the pairs' own order, of w2 [experts,
// HIDDEN, INNER] and h.
//
// An item is a tile of up to ROWS pairs of one expert and M outputs' weights; those of w13 come first. A block takes the
// item of its number, and then the next one that nobody has taken. One warp has TMA bring chunks of KC inputs of these
// outputs, STAGES of them ahead and on into the next item; another one gathers the same inputs of the pairs; the others
// multiply both by tensor cores. Chunks lie in shared memory as in pipelined_gemm.cu: boxes of 64 inputs, whose pieces of
// 16 bytes change places in each row.
//
// Weights do not wait for each other's GEMM: only rows of h do, until `done` says that all items of their tile are there.
// Blocks may wait for each other so, as items of w13 are taken first and wait for nobody's. But each block's first item is
// its own, so that all blocks must come to a multiprocessor while others wait: no kernel beside this one may hold a
// multiprocessor until this one has ended. The counts in `done`, and behind them `taken`, of items, are zero before the
// launch and after it.
//
// Weights do not wait for the router either. A block's first item is known beforehand if every expert has one tile, so
// that its first chunks are asked for before the kernel's predecessors have ended. If it is another item, what has come is
// overwritten. (To bring further chunks to the second-level cache gained nothing, and items shared out beforehand lost 3
// %: benchmarks/results/h100-moe-layers-2026-11-25.txt.)

constexpr int M = 128;                         // outputs' weights of an item
constexpr int ROWS = 8 * TILES;                // pairs of an item
constexpr int BOXES = KC / 64;                 // of a chunk
constexpr int STAGE = (M + ROWS) * KC * 2;     // bytes
constexpr int THREADS = M / 16 * 32;           // that multiply; two more warps bring what they need
constexpr int WIDE = ROWS + 1;
constexpr int TURNS = 4;                       // items that one warp of a block may be ahead of another
#include "tma.cuh"
#include "mma.cuh"
#include "smem_tile.cuh"
#include "tile_sums.cuh"

struct Up {
    static constexpr bool GATED = true;
    static constexpr int INPUTS = HIDDEN, WIDTH = INNER, OUTPUTS = 2 * INNER, OUTS = M / 2;
    static constexpr int BLOCKS = WIDTH / OUTS, CHUNKS = INPUTS / KC;  // of a tile, of an item
};
struct Down {
    static constexpr bool GATED = false;
    static constexpr int INPUTS = INNER, WIDTH = HIDDEN, OUTPUTS = HIDDEN, OUTS = M;
    static constexpr int BLOCKS = WIDTH / OUTS, CHUNKS = INPUTS / KC;
};
constexpr int EARLY = STAGES < Up::CHUNKS ? STAGES : Up::CHUNKS;

#if __CUDA_ARCH__ >= 900
struct Item {
    bool up;
    int tile, expert, block, start, rows;
};

// All is loaded past the first-level cache, which another kernel may have filled before the tiles were there.
struct Tiles {
    const int *ends, *experts, *starts;
    int used;

    // By a warp, which counts the tiles that are needed.
    __device__ Tiles(const int* ends, const int* experts, const int* starts, int most)
        : ends(ends), experts(experts), starts(starts), used(0) {
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
        item.rows = min(ROWS, __ldcg(ends + item.expert + 1) - item.start);
        return item;
    }
};

// The numbers of a block's items, from the thread that asks for weights to the other warps.
struct Queue {
    volatile int* numbers;
    Barrier *posted, *read;

    __device__ void post(int k, int number) const {
        if (k >= TURNS) mbarrier_wait(read + k % TURNS, k / TURNS - 1);
        numbers[k % TURNS] = number;
        mbarrier_arrive(posted + k % TURNS);
    }
    __device__ int get(int k) const {
        mbarrier_wait(posted + k % TURNS, k / TURNS);
        const int number = numbers[k % TURNS];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(read + k % TURNS);
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

// What asks for a chunk's weights.
template <class G> struct Boxes {
    const TensorMap* map;
    int row;

    __device__ Boxes(const TensorMap* map, int expert, int block) : map(map), row(expert * G::OUTPUTS + block * G::OUTS) {}
    __device__ void load(int chunk, unsigned to, Barrier* barrier) const {
        mbarrier_expect(barrier, M * KC * 2);
#pragma unroll
        for (int b = 0; b < BOXES; b++, to += M * 128) {
            tma_load(to, map, chunk * KC + b * 64, row, barrier);
            if (G::GATED) tma_load(to + G::OUTS * 128, map, chunk * KC + b * 64, row + G::WIDTH, barrier);
        }
    }
};

// One thread: an item's weights; n chunks came before. there: chunks that are under way to the stages of their numbers, as
// `early` will tell.
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

// One warp: an item's rows of x, of which this lane knows `mine`. Rows that the item lacks are zeros.
template <class G>
__device__ inline void bring_rows(const T* x, int mine, int rows, const Ring& ring, int& n) {
    constexpr int PIECES = KC / 8;  // of a row
    const int lane = threadIdx.x % 32;
    for (int c = 0; c < G::CHUNKS; c++, n++) {
        const int stage = n % STAGES;
        ring.wait_for_room(n);
        const unsigned to = ring.at + stage * STAGE + BOXES * M * 128;
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / 32; i++) {
            const int r = (i * 32 + lane) / PIECES, piece = (i * 32 + lane) % PIECES;
            const T* row = x + (long long)__shfl_sync(0xffffffffu, mine, r) * G::INPUTS + c * KC;
            copy_async16(to + (piece / 8 * ROWS + r) * 128 + (piece % 8 ^ r % 8) * 16, row + piece * 8, r < rows);
        }
        arrive_when_copied(ring.full + stage);
    }
}

// An item's values, once all sums are there. Lanes have their rows' pairs and weights. A warp's elements are of one row.
template <class G>
__device__ inline void store(const float* sums, const Item& item, int pairs, float weights, T* y) {
    for (int i = threadIdx.x; i < item.rows * G::OUTS; i += THREADS) {
        const int row = i / G::OUTS, out = i % G::OUTS;
        const long long to = G::GATED ? item.start + row : __shfl_sync(0xffffffffu, pairs, row);
        float value = sums[out * WIDE + row];
        if (G::GATED)
            value = gated<T, ACT>(value, sums[(G::OUTS + out) * WIDE + row]) * __shfl_sync(0xffffffffu, weights, row);
        y[to * G::WIDTH + item.block * G::OUTS + out] = from_float<T>(value);
    }
}

// The warps that multiply: an item.
template <class G>
__device__ inline void multiply(const Item& item, const TileLane& place, const Ring& ring, float* sums, const int* order,
                                const float* weights, T* y, int& n) {
    const int lane = threadIdx.x % 32;
    float sum[1][TILES][4] = {}, mine = 0;
    const int pair = lane < item.rows ? __ldcg(order + item.start + lane) : 0;
    if (G::GATED) mine = __ldcg(weights + pair);
#pragma unroll 1
    for (const int start = n, end = n + G::CHUNKS; n < end; n++) {
        const int stage = n % STAGES;
        mbarrier_wait(ring.full + stage, n / STAGES);
        // What was loaded of the chunk before has been multiplied, so that it has been read.
        if (n > start && lane == 0) mbarrier_arrive(ring.empty + (n - 1) % STAGES);
#pragma unroll
        for (int i = 0; i < KC / 16; i++) multiply_step(sum[0], place, stage, i);
    }
    release_stage(ring.empty + (n - 1) % STAGES);
    keep_sums<WIDE>(sum, sums + (threadIdx.x / 32 * 16 + lane / 4) * WIDE + lane % 4 * 2);
    block_sync<THREADS>(1);
    store<G>(sums, item, pair, mine, y);
    block_sync<THREADS>(1);  // all is stored, and sums may be overwritten
}

// The warp that asks for weights.
__device__ inline void weights_warp(const TensorMap* of_w13, const TensorMap* of_w2, const int* ends, const int* tile_expert,
                                    const int* tile_start, const Ring& ring, const Queue& queue, int* taken, int most,
                                    int experts) {
    const int likely = blockIdx.x / Up::BLOCKS;  // the expert of the first item
    const bool guessed = likely < experts;
    if (guessed && elected()) {
        const Boxes<Up> boxes(of_w13, likely, blockIdx.x % Up::BLOCKS);
        for (int c = 0; c < EARLY; c++) boxes.load(c, ring.at + c * STAGE, ring.early + c);
    }
    __syncwarp();
    grid_wait();
    const Tiles tiles(ends, tile_expert, tile_start, most);
    if (!elected()) return;
    const int items = tiles.items();
    int number = blockIdx.x, n = 0;
    bool right = false;
    if (guessed && number < items) {
        const Item first = tiles.find(number);  // of w2 where few tiles are needed, maybe of the same expert
        right = first.up && first.expert == likely;
    }
    if (guessed && !right)
        for (int c = 0; c < EARLY; c++) mbarrier_wait(ring.early + c, 0);
    for (int k = 0;; k++) {
        queue.post(k, number);
        if (number >= items) return;
        const Item item = tiles.find(number);
        const int before = atomicAdd(taken, 1);  // nobody waits for it before this item's weights are asked for
        if (item.up)
            bring_weights<Up>(of_w13, item, ring, right ? EARLY : 0, n);
        else
            bring_weights<Down>(of_w2, item, ring, 0, n);
        if (before == items - 1) *taken = 0;  // each item asks once for the next
        number = gridDim.x + before;
    }
}

// The warp that gathers rows.
__device__ inline void rows_warp(const T* x, const T* h, const int* order, const Tiles& tiles, const Ring& ring,
                                 const Queue& queue, int* done) {
    const int lane = threadIdx.x % 32, items = tiles.items();
    for (int k = 0, n = 0;; k++) {
        const int number = queue.get(k);
        if (number >= items) break;
        const Item item = tiles.find(number);
        const int mine = item.start + (lane < item.rows ? lane : 0);
        if (item.up) {
            bring_rows<Up>(x, __ldcg(order + mine) / TOP, item.rows, ring, n);
        } else {
            int* const count = done + item.tile;
            wait_for_count(count, Up::BLOCKS);
            __syncwarp();  // all lanes have seen the count that the last warp to see it clears
            if (lane == 0 && atomicAdd(count, 1) == Up::BLOCKS + Down::BLOCKS - 1) *count = 0;
            bring_rows<Down>(h, mine, item.rows, ring, n);
        }
    }
    wait_for_copies();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
expert_mlp(const T* x, const __grid_constant__ TensorMap of_w13, const __grid_constant__ TensorMap of_w2, const int* order,
           const int* ends, const int* tile_expert, const int* tile_start, const float* weights, T* h, T* y, int* done, int most,
           int experts) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES], early[STAGES], posted[TURNS], read[TURNS];
    __shared__ int numbers[TURNS];
    const unsigned start = (smem_address(memory) + 1023) / 1024 * 1024;
    float* sums = (float*)((char*)memory + (start - smem_address(memory)) + STAGES * STAGE);
    const int warp = threadIdx.x / 32;
    const Ring ring{start, full, empty, early};
    const Queue queue{numbers, posted, read};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s, 1 + 32);  // TMA's and those of the warp that gathers
            mbarrier_init(empty + s, THREADS / 32);
            mbarrier_init(early + s, 1);
        }
        for (int t = 0; t < TURNS; t++) {
            mbarrier_init(posted + t, 1);
            mbarrier_init(read + t, THREADS / 32 + 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warp == THREADS / 32) {
        weights_warp(&of_w13, &of_w2, ends, tile_expert, tile_start, ring, queue, done + most, most, experts);
        return;
    }
    grid_wait();
    const Tiles tiles(ends, tile_expert, tile_start, most);
    if (warp > THREADS / 32) {
        launch_dependents();
        rows_warp(x, h, order, tiles, ring, queue, done);
        return;
    }
    const TileLane place(start, warp, threadIdx.x % 32);
    const int items = tiles.items();
    for (int k = 0, n = 0;; k++) {
        const int number = queue.get(k);
        if (number >= items) break;
        const Item item = tiles.find(number);
        if (item.up) {
            multiply<Up>(item, place, ring, sums, order, weights, h, n);
            if (threadIdx.x == 0) {  // h is stored, by threads that have met
                __threadfence();
                atomicAdd(done + item.tile, 1);
            }
        } else {
            multiply<Down>(item, place, ring, sums, order, weights, y, n);
        }
    }
#endif
}
