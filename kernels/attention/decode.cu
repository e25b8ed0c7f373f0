// One token of each of n sequences over the paged cache, at the speed at which keys and values are read: from sm_90 on.
//
// What is read of all sequences stands in one row, which is shared out evenly (stream_k.cuh): a run for each KV_HEADS
// blocks, of which each takes one key head, so that what lies side by side in the cache is read at one time. A sequence
// that lies in several runs is added up by the block that comes to it last. One warp has TMA bring keys and
// values to shared memory, STAGES tiles of TILE tokens ahead and on into the next sequence; one prepares the next
// sequence's heads; the others take 16 tokens of each tile for all query heads of the key head. With ROTATE the step's
// newest token is still in q, k and v: heads are normed (NORM) and rotated here, key and value are written to the cache
// and taken from registers. Online softmax after FlashAttention-2 (Dao 2023, arXiv 2307.08691), even shares after
// Stream-K (Osama et al. 2023, arXiv 2301.03598).
//
// FP8: the cache has e4m3 codes, and their scales of a block and key head side by side (rope/fp8_cache.py); BOX is SIZE
// then. Codes become f16 between shared memory and the tensor cores: fp8_operand.cuh.
#include "tma.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "fp8_cache.cuh"

constexpr int WARPS = TILE / 16, THREADS = WARPS * 32, ALL = THREADS + 64, HALF = DIM / 2;
constexpr int BYTES = FP8 ? 1 : 2;  // of an element in the cache
constexpr int TOKEN_BYTES = DIM * BYTES, RUN_BYTES = TOKEN_BYTES % 128 == 0 ? 128 : TOKEN_BYTES % 64 == 0 ? 64 : 32;
constexpr int RUNS = TOKEN_BYTES / RUN_BYTES;  // of a token: each as wide as one of TMA's swizzles
constexpr int TILE_BYTES = TILE * TOKEN_BYTES, GROUP = HEADS / KV_HEADS;
constexpr int SCALE_BYTES = FP8 ? 2 * TILE : 0;  // of a tile, of each box its keys' and then its values'
constexpr int ROWS = GROUP > 8 ? 16 : 8, WIDE = DIM + 8;  // of q in shared memory: no two of 8 rows in the same banks
constexpr int PIECES = RUN_BYTES / 16;                    // of a run
// A head is shared out to LANES lanes of a warp: each has PAIRS pairs of elements that are rotated together.
constexpr int PAIRS = HALF > 64 ? 4 : HALF > 32 ? 2 : 1, LANES = HALF / PAIRS;

typedef OperandType<FP8 != 0>::type Operand;  // what tensor cores multiply

struct Step {  // pointers and sizes that the warps share
    const T *q, *k, *v, *q_weight, *k_weight;
    const float *cos, *sin;
    const long long* slots;
    T *keys, *values;  // codes where FP8
    unsigned char* scales;
    const int* tables;
    T* out;
    float *parts, *sums;
    int* arrived;
    const float* sinks;
    int q_row, k_row, v_row, table_row;
    float scale, eps, softcap;
};

struct KVMaps {  // of the cache, by boxes of BOX tokens and of FEW
    const TensorMap *keys, *values, *few_keys, *few_values;
};

#if __CUDA_ARCH__ >= 900
#include "stream_k.cuh"
#include "q_prep.cuh"
#include "fp8_operand.cuh"
#include "online_softmax.cuh"
#include "kv_tile.cuh"
static_assert(!FP8 || BOX == SIZE, "a box has its block's scales");
static_assert(DIM % (32 / BYTES) == 0 && LANES <= 32, "heads are of whole matmuls, and of at most 256 elements");
static_assert(FEW * RUNS % 8 == 0 && BOX % FEW == 0, "a box is of whole swizzles");
static_assert(1024 + STAGES * (2 * TILE_BYTES + SCALE_BYTES) + WARPS * GROUP * (DIM + 2) * 4 + 2 * sizeof(Heads) +
                      SEQUENCES * 4 == ROOM,
              "decode.py reckons with another layout of shared memory");

constexpr int EACH = (SEQUENCES + ALL - 1) / ALL;  // sequences that a thread counts boxes of
struct OwnLengths {
    int x[EACH];
};

// They, and tables, are loaded past the first-level cache: another step may have left others there, and grid_wait() has
// not been passed.
__device__ __forceinline__ OwnLengths load_lengths(const int* lengths, int n) {
    OwnLengths own;
#pragma unroll
    for (int i = 0, b = threadIdx.x * EACH; i < EACH; i++, b++) own.x[i] = load_if(lengths + b, b < n);
    return own;
}

// Block tables of few sequences are brought near while their lengths are under way: more would be read in vain, as how
// much of them is used is not known yet.
__device__ __forceinline__ void prefetch_tables(const int* tables, int n, int table_row) {
    constexpr int MOST = 4, LINE = 32;  // sequences; numbers
    const long long at = ((long long)blockIdx.x * ALL + threadIdx.x) * LINE;
    if (n <= MOST && at < (long long)n * table_row) prefetch_line(tables + at);
}

struct Found {  // where a run begins: in sequence b, whose boxes stand from `at` on
    int b, at, boxes;
};

// How sequences are shared out, and where this block's run begins and ends, if there is one for it. `kept`: all
// lengths, for all threads to see.
__device__ inline StreamKRuns find_run(const OwnLengths& own, int n, int wanted, int run, int* kept, Found* ends) {
    __shared__ int counts[ALL / 32], tiles[ALL / 32];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int boxes[EACH] = {}, mine = 0, mine_in_tiles = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (thread * EACH + i >= n) continue;
        const Span span(kept[thread * EACH + i] = own.x[i]);
        mine += boxes[i] = span.boxes(), mine_in_tiles += span.tiles();
    }
    mine_in_tiles = __reduce_add_sync(~0u, mine_in_tiles);
    int at = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, at, d);
        if (lane >= d) at += other;
    }
    if (lane == 31) counts[warp] = at, tiles[warp] = mine_in_tiles;
    __syncthreads();
    at -= mine;
    int all = 0, all_tiles = 0;
#pragma unroll
    for (int w = 0; w < ALL / 32; w++) at += w < warp ? counts[w] : 0, all += counts[w], all_tiles += tiles[w];
    const StreamKRuns runs(all, all_tiles, wanted);
#pragma unroll
    for (int end = 0; end < 2; end++) {
        const int begin = runs.begin(run + end);
        int b = -1, from = 0, count = 0;
#pragma unroll
        for (int i = 0, next = at; i < EACH; next += boxes[i++])
            if (begin >= next && begin < next + boxes[i]) b = thread * EACH + i, from = next, count = boxes[i];
        if (b >= 0) ends[end] = {b, from, count};
    }
    if (thread == 0 && run + 1 >= runs.count) ends[1] = {n, runs.begin(run + 1), 0};
    __syncthreads();
    return runs;
}

struct SharedState {  // what a block's warps tell each other, and the borders of its run
    Barrier *full, *empty, *ready, *taken, *told;  // [STAGES] twice, [2] twice, one
    Border* borders;                               // [2]
    int *complete, *latest;
};

struct Buffers {  // in dynamic shared memory
    unsigned ring;          // STAGES tiles of keys, each with the one of values behind it
    unsigned char* scales;  // [STAGES, SCALE_BYTES]
    float *mixed, *tops;    // [WARPS, GROUP, DIM], [WARPS, 2, GROUP]
    Heads* heads;           // [2]
    int* lengths;           // of all sequences

    __device__ explicit Buffers(uint4* memory) : ring((smem_address(memory) + 1023) / 1024 * 1024) {
        scales = (unsigned char*)memory + (ring - smem_address(memory)) + STAGES * 2 * TILE_BYTES;
        mixed = (float*)(scales + STAGES * SCALE_BYTES), tops = mixed + WARPS * GROUP * DIM;
        heads = (Heads*)(tops + WARPS * 2 * GROUP), lengths = (int*)(heads + 2);
    }
};

__device__ __forceinline__ void init_barriers(const SharedState& state) {
    for (int s = 0; s < STAGES; s++) mbarrier_init(state.full + s, 1), mbarrier_init(state.empty + s, WARPS);
    for (int i = 0; i < 2; i++) mbarrier_init(state.ready + i, 1), mbarrier_init(state.taken + i, WARPS);
    mbarrier_init(state.told, 1);
    fence_mbarrier_init();
}

__device__ __forceinline__ void prefetch_maps(const KVMaps& maps) {
    prefetch_tensor_map(maps.keys), prefetch_tensor_map(maps.values);
    prefetch_tensor_map(maps.few_keys), prefetch_tensor_map(maps.few_values);
}

// Rows without a head stay so.
__device__ __forceinline__ void clear_heads(Heads* heads, int thread) {
    constexpr int CLEARED = ROWS * WIDE / 8;  // pieces of 16 bytes
    for (int i = thread; i < 2 * CLEARED; i += ALL)
        ((uint4*)heads[i / CLEARED].rotated)[i % CLEARED] = make_uint4(0, 0, 0, 0);
}

// A box of keys to `to`, and of values to the tile behind it, of which so many tokens are there.
__device__ __forceinline__ void load_box(const KVMaps& maps, unsigned to, int head, int row, int tokens,
                                         Barrier* full) {
    if (tokens > BOX - FEW) {
        tma_load_runs(to, maps.keys, head * RUNS, row, full);
        tma_load_runs(to + TILE_BYTES, maps.values, head * RUNS, row, full);
    } else {  // a sequence's last box: a few tokens at a time, so that none is fetched in vain
#pragma unroll 1
        for (int i = 0; i < tokens; i += FEW) {
            tma_load_runs(to + i * TOKEN_BYTES, maps.few_keys, head * RUNS, row + i, full);
            tma_load_runs(to + i * TOKEN_BYTES + TILE_BYTES, maps.few_values, head * RUNS, row + i, full);
        }
    }
}

// A tile of so many tokens, whose boxes lie in the cache at `row` of the lanes from `first` on.
__device__ __forceinline__ void load_tile(const Step& step, const KVMaps& maps, const Buffers& buffers,
                                          const SharedState& state, int t, int row, int first, int tokens, int head) {
    const int stage = t % STAGES;
    Barrier* const full = state.full + stage;
    int rows[PER_TILE];
#pragma unroll
    for (int i = 0; i < PER_TILE; i++) rows[i] = __shfl_sync(~0u, row, first + i);
    if (elected()) {
        if (t >= STAGES) mbarrier_wait(state.empty + stage, t / STAGES - 1);
        const int scaled = FP8 ? (tokens + BOX - 1) / BOX * BOX * 2 : 0;
        mbarrier_expect(full, (tokens + FEW - 1) / FEW * FEW * 2 * TOKEN_BYTES + scaled);
#pragma unroll
        for (int i = 0; i < PER_TILE; i++) {
            const int left = tokens - i * BOX;
            if (left <= 0) break;
            if (FP8)
                bulk_load(smem_address(buffers.scales) + stage * SCALE_BYTES + i * BOX * 2,
                          step.scales + ((long long)(rows[i] / SIZE) * KV_HEADS + head) * 2 * SIZE, BOX * 2, full);
            load_box(maps, buffers.ring + stage * 2 * TILE_BYTES + i * BOX * TOKEN_BYTES, head, rows[i], left, full);
        }
    }
    __syncwarp();
}

// The warp that has TMA bring the run's tiles: each lane looks up where a box lies, one asks for them.
__device__ __forceinline__ void load_tiles(const Step& step, const KVMaps& maps, const Buffers& buffers,
                                           const SharedState& state, Way& way, int head, int lane) {
    constexpr int AHEAD = 32 * BOX;  // tokens that are looked up at once
    auto look_up = [&](bool more) {  // the block of this lane's box, of those from way.at on
        const int token = way.at + lane * BOX;
        return load_if(step.tables + (long long)way.b * step.table_row + token / SIZE, more && token < way.stop);
    };
    int block = look_up(true), t = 0;
    for (bool more = true; more;) {
        int at = way.at, first = 0;
        const int stop = min(way.stop, at + AHEAD), row = block * SIZE + (at + lane * BOX) % SIZE;
        way.at += AHEAD, more = way.at < way.stop || way.next();
        block = look_up(more);  // what comes next is asked for beforehand
        do {  // once where there is nothing, too
            load_tile(step, maps, buffers, state, t++, row, first, min(stop - at, TILE), head);
            at += TILE, first += PER_TILE;
        } while (at < stop);
    }
}

// The warp that prepares each sequence's heads for those that attend.
__device__ __forceinline__ void prepare_heads(const Step& step, const Buffers& buffers, const SharedState& state, Way& way,
                                              int head, int lane) {
    int item = 0;
    do {
        if (item >= 2) mbarrier_wait(state.taken + item % 2, item / 2 - 1);
        prepare(step, way.b, head, way.newest(Span(buffers.lengths[way.b])), buffers.heads[item % 2]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(state.ready + item % 2);
        item++;
    } while (way.next());
}

// What the block's warps have stored of a sequence goes to `out`. Where other runs have parts of it, too, the block
// that comes to it last adds them up; the others store theirs.
__device__ __forceinline__ void finish_sequence(const Step& step, const Buffers& buffers, const SharedState& state,
                                                const Way& way, const Span& span, int run, int head, int warp) {
    const bool begins = way.at == span.start, whole = begins && way.stop == span.last;
    const Border& divided = state.borders[begins];  // if not `whole`
    int* const count = step.arrived + way.b * KV_HEADS + head;
    T* const to = step.out + ((long long)way.b * HEADS + head * GROUP) * DIM;
    if (begins && !whole) mbarrier_wait(state.told, 0);
    const bool all_here = whole || (begins && *state.complete);
    if (!all_here) {
#pragma unroll 1
        for (int g = warp; g < GROUP; g += WARPS)
            store_part(step, place(run, head, begins, g), merge(buffers.tops, buffers.mixed, g));
        block_sync<THREADS>(1);
        if (threadIdx.x == 0) *state.latest = add_one(count) == divided.count - 1;
        block_sync<THREADS>(1);
        if (!*state.latest) return;
    }
#pragma unroll 1
    for (int g = warp; g < GROUP; g += WARPS) {
        Part part =
            all_here ? merge(buffers.tops, buffers.mixed, g) : load_part(step, place(divided.first, head, true, g));
        if (!whole) part = add_up(step, part, divided, head, g);
        if (SINKS) part = with_sink(part, step.sinks[head * GROUP + g]);
        store_out(to + g * DIM, part);
    }
    if (!whole && threadIdx.x == 0) *count = 0;
}

// The other warps: attention over the run, each to 16 tokens of every tile.
__device__ __forceinline__ void attend_run(const Step& step, const Buffers& buffers, const SharedState& state, Way& way,
                                           int run, int head, int warp, int lane) {
    int t = 0, item = 0;
    do {
        const Span span(buffers.lengths[way.b]);
        const Heads& now = buffers.heads[item % 2];
        QueryFragments queries;
        OnlineSoftmax softmax;
        mbarrier_wait(state.ready + item % 2, item / 2);
        load_queries(queries, now, lane);
        if (warp == 0 && way.newest(span)) softmax.take_newest(now);
        const float scale = FP8 ? step.scale * now.q_scale : step.scale;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(state.taken + item % 2);
        item++;
        int at = way.at;
        do {  // once where there is nothing, too
            const int stage = t % STAGES, token = at + warp * 16;  // the first of this warp's 16
            const int first = WINDOW ? max(span.first - token, 0) : 0, last = min(way.stop - token, 16);
            const unsigned k_at = buffers.ring + stage * 2 * TILE_BYTES, v_at = k_at + TILE_BYTES;
            mbarrier_wait(state.full + stage, t / STAGES);
            if (first < last) {
                Fragments x;
                float s[2][4] = {};  // of 8 heads each
                unsigned p[ROWS / 8][2];
                const TileScales by(buffers.scales + stage * SCALE_BYTES, warp * 16, first, last);
                load_keys(x, k_at, warp, lane);
                compute_scores(s, x, queries);
                if (first > 0 || last < 16) clear_values(v_at, first, last, warp, lane);
                load_values(x, v_at, warp, lane);
                softmax.take(s, first, last, scale, step.softcap, by, p);
                add_values(softmax, x, p);
            }
            release_stage(state.empty + stage);
            at += TILE, t++;
        } while (at < way.stop);
        block_sync<THREADS>(1);  // what the sequence before has left here has been read
        softmax.store(buffers.tops + warp * 2 * GROUP, buffers.mixed + warp * GROUP * DIM);
        block_sync<THREADS>(1);
        finish_sequence(step, buffers, state, way, span, run, head, warp);
    } while (way.next());
}
#endif

extern "C" __global__ void __launch_bounds__(ALL, 2)
decode(const __grid_constant__ TensorMap of_k, const __grid_constant__ TensorMap of_v,
       const __grid_constant__ TensorMap few_k, const __grid_constant__ TensorMap few_v, const T* q, const T* k,
       const T* v, const float* cos, const float* sin, const T* q_weight, const T* k_weight, const long long* slots,
       T* keys, T* values, unsigned char* scales, const int* tables, const int* lengths, T* out, float* parts,
       float* sums, int* arrived, const float* sinks, int n, int q_row, int k_row, int v_row, int table_row,
       float scale, float eps, float softcap) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES], ready[2], taken[2], told;
    __shared__ Border borders[2];
    __shared__ Found ends[2];
    __shared__ int complete, latest;
    const SharedState state = {full, empty, ready, taken, &told, borders, &complete, &latest};
    const Step step = {q, k, v, q_weight, k_weight, cos, sin, slots, keys, values, scales, tables, out, parts, sums,
                       arrived, sinks, q_row, k_row, v_row, table_row, scale, eps, softcap};
    const KVMaps maps = {&of_k, &of_v, &few_k, &few_v};
    const Buffers buffers(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    launch_dependents();
    // q, k and v are made by a GEMM. Ours launch_dependents() late, and the library's begin when what is before them
    // has ended: all else that is read was there before. Without ROTATE keys and values come from the kernel before.
    // Lengths come first: where a run's tiles lie follows from them.
    OwnLengths own;
    if (ROTATE) own = load_lengths(lengths, n);
    prefetch_tables(tables, n, table_row);
    if (thread == THREADS + 32) init_barriers(state);  // in another warp than the first lengths: its fence awaits loads
    if (thread == THREADS) prefetch_maps(maps);
    clear_heads(buffers.heads, thread);
    // Runs of whole sequences, where all are of one length and there are enough of them.
    const int most = gridDim.x / KV_HEADS, per_run = (n + most - 1) / most, whole = (n + per_run - 1) / per_run;
    const int run = blockIdx.x / KV_HEADS, head = blockIdx.x % KV_HEADS;
    if (!ROTATE) {
        grid_wait();
        own = load_lengths(lengths, n);
    }
    const StreamKRuns runs = find_run(own, n, whole * 10 >= most * 9 ? whole : most, run, buffers.lengths, ends);
    if (run >= runs.count) return;
    auto border = [&](int end) { return runs.border(run + end, ends[end].b, ends[end].at, ends[end].boxes); };
    auto position = [&](int end) { return runs.position(run + end, ends[end].b, ends[end].at, ends[end].boxes); };
    const Border of_run[2] = {position(0), position(1)};
    Way way(buffers.lengths, of_run);
    if (warp == WARPS) {
        load_tiles(step, maps, buffers, state, way, head, lane);
        // Later runs begin with the other parts of this one's last sequence: most often they are stored by now.
        grid_wait();
        const Border last = border(1);
        if (lane == 0 && last.box > 0) {
            *state.complete = counted(arrived + last.b * KV_HEADS + head) == last.count - 1;
            mbarrier_arrive(state.told);
        }
        return;
    }
    if (ROTATE && warp > WARPS) prefetch_rotation(step, way.b);
    grid_wait();
    if (warp > WARPS) return prepare_heads(step, buffers, state, way, head, lane);
    if (thread == 0 || thread == 32) borders[thread / 32] = border(thread / 32);  // for finish_sequence()
    attend_run(step, buffers, state, way, run, head, warp, lane);
#endif
}
