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
constexpr int RUN_BYTES = DIM * BYTES < 128 ? DIM * BYTES : 128, RUNS = DIM * BYTES / RUN_BYTES;  // of a token
constexpr int TILE_BYTES = TILE * DIM * BYTES, GROUP = HEADS / KV_HEADS;
constexpr int SCALE_BYTES = FP8 ? 2 * TILE : 0;  // of a tile, of each box its keys' and then its values'
constexpr int ROWS = GROUP > 8 ? 16 : 8, WIDE = DIM + 8;  // of q in shared memory: no two of 8 rows in the same banks
constexpr int PAIRS = HALF / 32;                          // of elements that are rotated together, of a lane
constexpr int PIECES = RUN_BYTES / 16;                    // of a run

typedef OperandType<FP8 != 0>::type Operand;  // what tensor cores multiply

struct Step {  // pointers and sizes that the warps share
    const T *q, *k, *v, *q_weight, *k_weight;
    const float *cos, *sin;
    const long long* slots;
    T *keys, *values;  // codes where FP8
    unsigned char* scales;
    float *parts, *sums;
    int q_row, k_row, v_row;
    float scale, eps, softcap;
};

#if __CUDA_ARCH__ >= 900
// Where a token's piece of 16 bytes lies in a tile, whose runs of 128 bytes of a token stand side by side:
// TMA's swizzle changes places of pieces by the run's number, in runs of 64 bytes by that of 128 bytes.
__device__ inline unsigned lies(int token, int half, int piece) {
    if (RUN_BYTES == 64) return token * 64 + (piece ^ token / 2 % 4) * 16;
    const int run = token * RUNS + half;
    return run * 128 + (piece ^ run % 8) * 16;
}

#include "stream_k.cuh"
#include "q_prep.cuh"
#include "fp8_operand.cuh"
#include "online_softmax.cuh"
static_assert(!FP8 || BOX == SIZE, "a box has its block's scales");
static_assert(RUN_BYTES == 128 || (RUN_BYTES == 64 && RUNS == 1), "a run is one of two swizzles");
static_assert(1024 + STAGES * (2 * TILE_BYTES + SCALE_BYTES) + WARPS * GROUP * (DIM + 2) * 4 + 2 * sizeof(Heads) + SEQUENCES * 4 == ROOM,
              "attention_tma.py reckons with another layout of shared memory");

// The borders of this block's run; false where there is none for it. `kept`: all lengths, for all threads to see. They,
// and tables, are loaded past the first-level cache: another step may have left others there, and grid_wait() has not
// been passed.
__device__ inline bool find_run(const int* lengths, int n, int wanted, int run, int* kept, Border* borders) {
    constexpr int EACH = (SEQUENCES + ALL - 1) / ALL;  // sequences that a thread counts boxes of
    __shared__ int counts[ALL / 32], tiles[ALL / 32];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int boxes[EACH], mine = 0, mine_in_tiles = 0;  // lengths first
#pragma unroll
    for (int i = 0; i < EACH; i++) boxes[i] = thread * EACH + i < n ? __ldcg(lengths + thread * EACH + i) : 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (thread * EACH + i >= n) continue;
        const Span span(kept[thread * EACH + i] = boxes[i]);
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
    if (run >= runs.count) return false;
#pragma unroll 1
    for (int end = 0; end < 2; end++) {
        const int begin = runs.begin(run + end);
        int b = -1, from = 0, count = 0;
#pragma unroll
        for (int i = 0, next = at; i < EACH; next += boxes[i++])
            if (begin >= next && begin < next + boxes[i]) b = thread * EACH + i, from = next, count = boxes[i];
        if (b >= 0) borders[end] = runs.border(run + end, b, from, count);
    }
    if (thread == 0 && run + 1 == runs.count) borders[1] = {n, 0, 0, 0};
    __syncthreads();
    return true;
}
#endif

extern "C" __global__ void __launch_bounds__(ALL, 2)
decode(const __grid_constant__ TensorMap of_k, const __grid_constant__ TensorMap of_v, const __grid_constant__ TensorMap few_k,
       const __grid_constant__ TensorMap few_v, const T* q, const T* k, const T* v, const float* cos, const float* sin,
       const T* q_weight, const T* k_weight, const long long* slots, T* keys, T* values, unsigned char* scales, const int* tables,
       const int* lengths, T* out, float* parts, float* sums, int* arrived, const float* sinks, int n, int q_row, int k_row, int v_row, int table_row, float scale,
       float eps, float softcap) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES], ready[2], taken[2], told;
    __shared__ Border borders[2];
    __shared__ int complete, latest;
    const Step step = {q, k, v, q_weight, k_weight, cos, sin, slots, keys, values, scales, parts, sums, q_row, k_row, v_row,
                       scale, eps, softcap};
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    unsigned char* const kept_scales = (unsigned char*)memory + (ring - smem_address(memory)) + STAGES * 2 * TILE_BYTES;
    float* const mixed = (float*)(kept_scales + STAGES * SCALE_BYTES);
    float* const tops = mixed + WARPS * GROUP * DIM;  // mixed [WARPS, GROUP, DIM], tops [WARPS, 2, GROUP]
    Heads* const heads = (Heads*)(tops + WARPS * 2 * GROUP);  // [2]
    int* const kept = (int*)(heads + 2);  // lengths of all sequences
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    launch_dependents();
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) mbarrier_init(full + s, 1), mbarrier_init(empty + s, WARPS);
        for (int i = 0; i < 2; i++) mbarrier_init(ready + i, 1), mbarrier_init(taken + i, WARPS);
        mbarrier_init(&told, 1);
        fence_mbarrier_init();
    }
    if (thread == THREADS) {
        prefetch_tensor_map(&of_k), prefetch_tensor_map(&of_v);
        prefetch_tensor_map(&few_k), prefetch_tensor_map(&few_v);
    }
    constexpr int CLEARED = ROWS * WIDE / 8;  // pieces of 16 bytes
    for (int i = thread; i < 2 * CLEARED; i += ALL) ((uint4*)heads[i / CLEARED].rotated)[i % CLEARED] = make_uint4(0, 0, 0, 0);
    // Runs of whole sequences, where all are of one length and there are enough of them.
    const int most = gridDim.x / KV_HEADS, per_run = (n + most - 1) / most, whole = (n + per_run - 1) / per_run;
    const int run = blockIdx.x / KV_HEADS, head = blockIdx.x % KV_HEADS;
    // q, k and v are made by a GEMM. Ours launch_dependents() late, and the library's begin when what is before them
    // has ended: all else that is read was there before. Without ROTATE keys and values come from the kernel before.
    if (!ROTATE) grid_wait();
    if (!find_run(lengths, n, whole * 10 >= most * 9 ? whole : most, run, kept, borders)) return;
    Way way(kept, borders);
    int t = 0, item = 0;
    if (warp == WARPS) {
        auto row = [&]() {  // of the cache, for this lane's box of the tile at way.at
            const int token = way.at + lane * BOX;
            const int* table = tables + (long long)way.b * table_row;
            return lane < PER_TILE && token < way.stop ? __ldcg(table + token / SIZE) * SIZE + token % SIZE : -1;
        };
        int ahead = row();
        for (bool more = true; more; t++) {
            const int stage = t % STAGES, now = ahead, left = min(way.stop - way.at, TILE), of_box = left - lane * BOX;
            way.at += TILE, more = way.at < way.stop || way.next();
            if (more) ahead = row();  // what comes next is asked for beforehand
            if (t >= STAGES) mbarrier_wait(empty + stage, t / STAGES - 1);
            const int scaled = FP8 ? (left + BOX - 1) / BOX * BOX * 2 : 0;
            if (lane == 0) mbarrier_expect(full + stage, (left + FEW - 1) / FEW * FEW * 2 * DIM * BYTES + scaled);
            __syncwarp();
            if (now < 0) continue;
            const unsigned at = ring + stage * 2 * TILE_BYTES + lane * BOX * DIM * BYTES;
            if (FP8)
                bulk_load(smem_address(kept_scales) + stage * SCALE_BYTES + lane * BOX * 2,
                          scales + ((long long)(now / SIZE) * KV_HEADS + head) * 2 * SIZE, BOX * 2, full + stage);
            if (of_box > BOX - FEW) {
                tma_load_runs(at, &of_k, head * RUNS, now, full + stage);
                tma_load_runs(at + TILE_BYTES, &of_v, head * RUNS, now, full + stage);
            } else {  // a sequence's last box: a few tokens at a time, so that none is fetched in vain
#pragma unroll 1
                for (int i = 0; i < of_box; i += FEW) {
                    tma_load_runs(at + i * DIM * BYTES, &few_k, head * RUNS, now + i, full + stage);
                    tma_load_runs(at + i * DIM * BYTES + TILE_BYTES, &few_v, head * RUNS, now + i, full + stage);
                }
            }
        }
        // Later runs begin with the other parts of this one's last sequence: most often they are stored by now.
        grid_wait();
        if (lane == 0 && borders[1].box > 0) {
            complete = stored(arrived + borders[1].b * KV_HEADS + head) == borders[1].count - 1;
            mbarrier_arrive(&told);
        }
        return;
    }
    grid_wait();
    if (warp > WARPS) {
        do {
            if (item >= 2) mbarrier_wait(taken + item % 2, item / 2 - 1);
            prepare(step, way.b, head, way.newest(Span(kept[way.b])), heads[item % 2]);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ready + item % 2);
            item++;
        } while (way.next());
        return;
    }
    do {
        const Span span(kept[way.b]);
        const Heads& now = heads[item % 2];
        unsigned columns[DIM / 16][ROWS / 4];  // q as the second operand of matmuls, of each 8 heads two
        OnlineSoftmax softmax;
        mbarrier_wait(ready + item % 2, item / 2);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++)
            ldmatrix(columns[i],
                     smem_address(now.rotated + (lane / 16 * 8 + lane % 8) % ROWS * WIDE + i * 16 + lane / 8 % 2 * 8));
        if (warp == 0 && way.newest(span)) softmax.take_newest(now);
        const float of_scores = FP8 ? scale * now.q_scale : scale;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(taken + item % 2);
        item++;
        int at = way.at;
        do {  // once where there is nothing, too
            const int stage = t % STAGES, token = at + warp * 16;  // the first of this warp's 16
            const int first = WINDOW ? max(span.first - token, 0) : 0, last = min(way.stop - token, 16);
            const unsigned k_at = ring + stage * 2 * TILE_BYTES, v_at = k_at + TILE_BYTES;
            mbarrier_wait(full + stage, t / STAGES);
            if (first < last) {
                constexpr int LOADS = DIM * BYTES / 32;
                unsigned x[LOADS][4];
                float s[2][4] = {};  // of 8 heads each, or for 8 alone by even and by odd i
                const TileScales by(kept_scales + stage * SCALE_BYTES, warp * 16, first, last);
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8, piece = i % 4 * 2 + lane / 16;
                    ldmatrix(x[i], k_at + lies(row, i / 4, piece));
                }
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    unsigned keys_of[4];
                    keys_operand(keys_of, x, i);
#pragma unroll
                    for (int h = 0; h < ROWS / 8; h++)
                        mma<Operand>(s[ROWS == 16 ? h : i % 2], keys_of, columns[i][2 * h], columns[i][2 * h + 1]);
                }
                if (first > 0 || last < 16) {  // whatever lies beside them, a NaN too, stays out
                    for (int i = lane; i < 16 * PIECES * RUNS; i += 32) {
                        const int row = i / PIECES % 16;
                        if (row < first || row >= last) zero_smem(v_at + lies(warp * 16 + row, i / (16 * PIECES), i % PIECES));
                    }
                    __syncwarp();
                }
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    const int row = warp * 16 + lane / 16 * 8 + lane % 8, piece = i % 4 * 2 + lane / 8 % 2;
                    ldmatrix_transposed(x[i], v_at + lies(row, i / 4, piece));
                }
                unsigned p[ROWS / 8][2];
#pragma unroll
                for (int i = 0; i < 4; i++) s[0][i] += ROWS == 8 ? s[1][i] : 0;
                softmax.take(s, first, last, of_scores, softcap, by, p);
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    unsigned values_of[4];
                    values_operand(values_of, x, i);
#pragma unroll
                    for (int h = 0; h < ROWS / 8; h++) mma<Operand>(softmax.o[i][h], values_of, p[h][0], p[h][1]);
                }
            }
            release_stage(empty + stage);
            at += TILE, t++;
        } while (at < way.stop);
        block_sync<THREADS>(1);  // what the sequence before has left here has been read
        softmax.store(tops + warp * 2 * GROUP, mixed + warp * GROUP * DIM);
        block_sync<THREADS>(1);
        const bool begins = way.at == span.start, whole = begins && way.stop == span.last;
        const Border& divided = borders[begins];  // if not `whole`
        int* const count = arrived + way.b * KV_HEADS + head;
        T* const to = out + ((long long)way.b * HEADS + head * GROUP) * DIM;
        if (begins && !whole) mbarrier_wait(&told, 0);
        const bool all_here = whole || (begins && complete);
        if (!all_here) {
#pragma unroll 1
            for (int g = warp; g < GROUP; g += WARPS) store_part(step, place(run, head, begins, g), merge(tops, mixed, g));
            block_sync<THREADS>(1);
            if (thread == 0) latest = add_one(count) == divided.count - 1;
            block_sync<THREADS>(1);
            if (!latest) continue;
        }
#pragma unroll 1
        for (int g = warp; g < GROUP; g += WARPS) {
            Part part = all_here ? merge(tops, mixed, g) : load_part(step, place(divided.first, head, true, g));
            if (!whole) part = add_up(step, part, divided, head, g);
            if (SINKS) part = with_sink(part, sinks[head * GROUP + g]);
            store_out(to + g * DIM, part);
        }
        if (!whole && thread == 0) *count = 0;
    } while (way.next());
#endif
}
