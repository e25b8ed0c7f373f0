// One token of each of n sequences over the paged cache, at the speed at which keys and values are read: from sm_90 on.
//
// All tiles of 64 tokens of all sequences stand in one row, which is shared out evenly: a run for each KV_HEADS blocks, of
// which each takes one key head, so that what lies side by side in the cache is read at one time. A sequence that lies in
// several runs is added up by the block that comes to it last. One warp has the copy engine bring keys and values to
// shared memory, STAGES tiles ahead and on into the next sequence; one prepares the next sequence's heads; four take 16
// tokens of each tile for all query heads of the key head. With TURN the step's newest token is still in q, k and v: heads
// are normed (NORM) and turned here, key and value are written to the cache and taken from registers. Online softmax after
// FlashAttention-2 (Dao 2023, arXiv 2307.08691), even shares after Stream-K (Osama et al. 2023, arXiv 2301.03598).
#include "engine.cuh"
#include "warp.cuh"

constexpr int WARPS = 4, THREADS = WARPS * 32, ALL = THREADS + 64, TILE = 64, HALVES = DIM / 64, HALF = DIM / 2;
constexpr int TILE_BYTES = TILE * DIM * 2, GROUP = HEADS / KV_HEADS, PER_TILE = TILE / BOX;
constexpr int ROWS = GROUP > 8 ? 16 : 8, WIDE = DIM + 8;  // of q in shared memory: no two of 8 rows in the same banks
constexpr int PAIRS = HALF / 32;                          // of elements that are turned together, of a lane
#define NOTHING __int_as_float(0xff800000)                // -infinity

struct Step {  // pointers and sizes that the warps share
    const T *q, *k, *v, *q_weight, *k_weight;
    const float *cos, *sin;
    const long long* slots;
    T *keys, *values, *out;
    const int *tables, *lengths;
    float *parts, *sums;
    int* arrived;
    int n, q_row, k_row, v_row, table_row;
    float scale, eps, cap;
};

#if __CUDA_ARCH__ >= 900
struct Span {  // of a sequence: the tokens that are read from the cache, and the tile in which they begin
    int length, first, last, tile;

    __device__ Span(int length) : length(length) {
        first = WINDOW ? max(length - WINDOW, 0) : 0, last = max(length - TURN, 0), tile = first / TILE;
    }
    __device__ int tiles() const { return max((last + TILE - 1) / TILE - tile, 1); }  // one where there is nothing, too
};

// A block's way through its run: tiles `at` to `stop` of sequence b, which has `tiles`.
struct Way {
    const int* ends;  // of sequences, in tiles
    int b, at, stop, tiles, left;

    __device__ Way(const int* ends, int n, int from, int to) : ends(ends), left(to - from) {
        int low = 0, high = n - 1;  // the first whose end lies behind `from`
        while (low < high) {
            int middle = (low + high) / 2;
            if (ends[middle] > from) high = middle;
            else low = middle + 1;
        }
        b = low;
        const int before = b ? ends[b - 1] : 0;
        tiles = ends[b] - before, at = from - before, stop = min(tiles, at + left);
    }
    __device__ bool next() {
        left -= stop - at, at = 0;
        if (left <= 0) return false;
        tiles = ends[b + 1] - ends[b], b++, stop = min(tiles, left);
        return true;
    }
    __device__ bool newest(const Span& span) const { return TURN && stop == tiles && span.length > 0; }
};

struct Heads {  // of a sequence, as one warp prepares them for the others
    T turned[ROWS * WIDE], v[DIM];
    float scores[16];  // of the newest token
};

// Heads are normed and turned where TURN; with `newest` its key and value go to the cache.
__device__ inline void prepare(const Step& step, int b, int head, bool newest, Heads& to) {
    const int lane = threadIdx.x % 32, at = lane * PAIRS;
    typedef Vec<T, PAIRS> Part;
    Part low[GROUP + 1], high[GROUP + 1], v_low, v_high;  // the last one: the key
    const long long slot = newest ? step.slots[b] : -1, in_cache = (slot * KV_HEADS + head) * DIM + at;
#pragma unroll
    for (int g = 0; g < GROUP + TURN; g++) {
        const T* x = (g < GROUP ? step.q + (long long)b * step.q_row + (head * GROUP + g) * DIM : step.k + (long long)b * step.k_row + head * DIM) + at;
        low[g] = *(const Part*)x, high[g] = *(const Part*)(x + HALF);
    }
    if (TURN) {
        const T* x = step.v + (long long)b * step.v_row + head * DIM + at;
        v_low = *(const Part*)x, v_high = *(const Part*)(x + HALF);
        float cos[PAIRS], sin[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            cos[i] = step.cos[(long long)b * DIM + at + i], sin[i] = step.sin[(long long)b * DIM + HALF + at + i];
#pragma unroll
        for (int g = 0; g < GROUP + 1; g++) {
            const T* weight = g < GROUP ? step.q_weight : step.k_weight;
            float scale = 0;
            if (NORM) {
#pragma unroll
                for (int i = 0; i < PAIRS; i++) scale += wide(low[g].x[i]) * wide(low[g].x[i]) + wide(high[g].x[i]) * wide(high[g].x[i]);
                scale = rsqrtf(warp_sum(scale) / DIM + step.eps);
            }
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                float x0 = wide(low[g].x[i]), x1 = wide(high[g].x[i]);
                if (NORM) {
                    x0 = wide(narrow<T>(x0 * scale * wide(weight[at + i])));
                    x1 = wide(narrow<T>(x1 * scale * wide(weight[HALF + at + i])));
                }
                low[g].x[i] = narrow<T>(x0 * cos[i] - x1 * sin[i]), high[g].x[i] = narrow<T>(x1 * cos[i] + x0 * sin[i]);
            }
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) *(Part*)(to.turned + g * WIDE + at) = low[g], *(Part*)(to.turned + g * WIDE + HALF + at) = high[g];
    if (!newest) return;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        float s = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            s += wide(low[g].x[i]) * wide(low[GROUP].x[i]) + wide(high[g].x[i]) * wide(high[GROUP].x[i]);
        s = warp_sum(s);
        if (lane == 0) to.scores[g] = score<CAPPED>(s, step.scale, step.cap);
    }
    *(Part*)(to.v + at) = v_low, *(Part*)(to.v + HALF + at) = v_high;
    if (slot < 0) return;
    *(Part*)(step.keys + in_cache) = low[GROUP], *(Part*)(step.keys + in_cache + HALF) = high[GROUP];
    *(Part*)(step.values + in_cache) = v_low, *(Part*)(step.values + in_cache + HALF) = v_high;
}

// The softmax of GROUP heads over what one warp has seen: a lane has rows lane / 4 and 8 below, pairs of columns.
struct Seen {
    float top[ROWS / 8], sum[ROWS / 8], o[DIM / 8][4];

    __device__ Seen() {
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) top[h] = NOTHING, sum[h] = 0;
#pragma unroll
        for (int i = 0; i < DIM / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) o[i][j] = 0;
    }
    __device__ void take_newest(const Heads& heads) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            top[h] = lane / 4 + h * 8 < GROUP ? heads.scores[lane / 4 + h * 8] : 0, sum[h] = lane % 4 == 0;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) o[i][h * 2 + j] = wide(heads.v[i * 8 + lane % 4 * 2 + j]);
        }
    }
    // 16 tokens, of which those from `from` to `to` count.
    __device__ void take(float (&s)[2][4], int from, int to, float scale, float cap) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            float best = top[h], total = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
                float& x = s[i / 2][h * 2 + i % 2];
                x = token >= from && token < to ? score<CAPPED>(x, scale, cap) : NOTHING;
                best = fmaxf(best, x);
            }
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float shrink = power(top[h] - best);  // some token counts: best is a number
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = s[i / 2][h * 2 + i % 2];
                total += x = power(x - best);
            }
            top[h] = best, sum[h] = sum[h] * shrink + total;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) o[i][h * 2] *= shrink, o[i][h * 2 + 1] *= shrink;
        }
    }
    // To shared memory: tops and sums [2, GROUP], values [GROUP, DIM].
    __device__ void store(float* tops, float* values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            float all = sum[h];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            const int row = lane / 4 + h * 8;
            if (row >= GROUP) continue;
            if (lane % 4 == 0) tops[row] = top[h], tops[GROUP + row] = all;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                *(float2*)(values + row * DIM + i * 8 + lane % 4 * 2) = make_float2(o[i][h * 2], o[i][h * 2 + 1]);
        }
    }
};

__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }  // the four warps

__device__ inline void store_out(T* to, float4 x, float by) {
    Vec<T, 4> y = {narrow<T>(x.x * by), narrow<T>(x.y * by), narrow<T>(x.z * by), narrow<T>(x.w * by)};
    *(Vec<T, 4>*)to = y;
}

// What the four warps have stored as one result: the heads' own, or a part of it in the slot `part`.
__device__ inline void merge(const Step& step, const float* tops, const float* values, T* out, int part) {
    for (int i = threadIdx.x; i < GROUP * DIM / 4; i += THREADS) {
        const int g = i / (DIM / 4), d = i % (DIM / 4) * 4;
        float top = NOTHING, sum = 0;
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * 2 * GROUP + g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float by = top == NOTHING ? 0 : power(tops[w * 2 * GROUP + g] - top);
            const float4 y = *(const float4*)(values + (w * GROUP + g) * DIM + d);
            sum += by * tops[(w * 2 + 1) * GROUP + g];
            x.x += by * y.x, x.y += by * y.y, x.z += by * y.z, x.w += by * y.w;
        }
        const float by = sum > 0 ? 1 / sum : 0;
        if (part < 0) {
            store_out(out + g * DIM + d, x, by);
        } else {
            *(float4*)(step.parts + (part * GROUP + g) * DIM + d) = make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
            if (d == 0) step.sums[part * GROUP + g] = sum > 0 ? top + log2f(sum) : NOTHING;
        }
    }
}

// The parts of `count` runs from `first` on, which all have been stored, as the heads' result.
__device__ inline void add_up(const Step& step, int first, int count, int head, T* out) {
    const int lane = threadIdx.x % 32;
    typedef Vec<float, DIM / 32> Part;
    auto slot = [&](int i) { return ((first + i) * KV_HEADS + head) * 2 + (i == 0); };
    for (int g = threadIdx.x / 32; g < GROUP; g += WARPS) {
        float top = NOTHING, total = 0;
        for (int i = lane; i < count; i += 32) top = fmaxf(top, __ldcg(step.sums + slot(i) * GROUP + g));
#pragma unroll
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        float x[DIM / 32] = {};
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            const float by = top == NOTHING ? 0 : power(__ldcg(step.sums + slot(i) * GROUP + g) - top);
            const float* from = step.parts + (slot(i) * GROUP + g) * DIM + lane * (DIM / 32);
            total += by;
#pragma unroll
            for (int d = 0; d < DIM / 32; d += 2) {
                const float2 y = __ldcg((const float2*)(from + d));
                x[d] += by * y.x, x[d + 1] += by * y.y;
            }
        }
        const float by = total > 0 ? 1 / total : 0;
#pragma unroll
        for (int d = 0; d < DIM / 32; d++) out[g * DIM + lane * (DIM / 32) + d] = narrow<T>(x[d] * by);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(ALL, 2)
decode(const __grid_constant__ Map of_k, const __grid_constant__ Map of_v, const T* q, const T* k, const T* v, const float* cos,
       const float* sin, const T* q_weight, const T* k_weight, const long long* slots, T* keys, T* values, const int* tables,
       const int* lengths, T* out, float* parts, float* sums, int* arrived, int n, int q_row, int k_row, int v_row,
       int table_row, float scale, float eps, float cap) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES], ready[2], taken[2];
    __shared__ int counts[ALL / 32], latest;
    const Step step = {q, k, v, q_weight, k_weight, cos, sin, slots, keys, values, out, tables, lengths, parts, sums, arrived,
                       n, q_row, k_row, v_row, table_row, scale, eps, cap};
    const unsigned ring = (shared(memory) + 1023) / 1024 * 1024;
    float* const mixed = (float*)((char*)memory + (ring - shared(memory)) + STAGES * 2 * TILE_BYTES);  // [WARPS, GROUP, DIM]
    float* const tops = mixed + WARPS * GROUP * DIM;                                                   // [WARPS, 2, GROUP]
    Heads* const heads = (Heads*)(tops + WARPS * 2 * GROUP);                                           // [2]
    int* const ends = (int*)(heads + 2);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    release();
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) init(full + s, 1), init(empty + s, WARPS);
        for (int i = 0; i < 2; i++) init(ready + i, 1), init(taken + i, WARPS);
        publish();
    }
    for (int i = thread; i < 2 * ROWS * WIDE; i += ALL) heads[i / (ROWS * WIDE)].turned[i % (ROWS * WIDE)] = narrow<T>(0);
    wait();
    // Where each sequence ends in the row of all tiles.
    const int each = (n + ALL - 1) / ALL, from = min(thread * each, n), to = min(from + each, n);
    int mine = 0;
    for (int b = from; b < to; b++) mine += Span(lengths[b]).tiles();
    int before = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += other;
    }
    if (lane == 31) counts[warp] = before;
    __syncthreads();
    before -= mine;
    for (int w = 0; w < warp; w++) before += counts[w];
    for (int b = from; b < to; b++) ends[b] = before += Span(lengths[b]).tiles();
    __syncthreads();
    // Runs of whole sequences, where all are of one length and there are enough of them.
    const int all = ends[n - 1], most = gridDim.x / KV_HEADS, per_run = (n + most - 1) / most, whole = (n + per_run - 1) / per_run;
    const int runs = max(min(whole * 10 >= most * 9 ? whole : most, all / LEAST), 1);
    const int run = blockIdx.x / KV_HEADS, head = blockIdx.x % KV_HEADS;
    if (run >= runs) return;
    Way way(ends, n, (long long)all * run / runs, (long long)all * (run + 1) / runs);
    int t = 0, item = 0;
    if (warp == WARPS) {
        const int* table;
        auto row = [&](const Span& span, int j) {  // of the cache, for this lane's box of a tile
            const int token = (span.tile + j) * TILE + lane * BOX;
            return lane < PER_TILE && token < span.last ? table[token / SIZE] * SIZE + token % SIZE : -1;
        };
        Span span(lengths[way.b]);
        table = tables + (long long)way.b * table_row;
        int ahead = row(span, way.at);
        for (bool more = true; more;) {  // what the next tile and the next sequence begin with is asked for beforehand
            Way after = way;
            more = after.next();
            const Span span_after(more ? lengths[after.b] : 0);
            for (int j = way.at; j < way.stop; j++, t++) {
                const int stage = t % STAGES, now = ahead, boxes = (span.last - (span.tile + j) * TILE + BOX - 1) / BOX;
                if (j + 1 < way.stop) {
                    ahead = row(span, j + 1);
                } else if (more) {
                    table = tables + (long long)after.b * table_row;
                    ahead = row(span_after, 0);
                }
                if (t >= STAGES) await(empty + stage, t / STAGES - 1);
                if (lane == 0) expect(full + stage, max(min(PER_TILE, boxes), 0) * 2 * BOX * DIM * 2);
                __syncwarp();
                if (now >= 0) {
                    const unsigned at = ring + stage * 2 * TILE_BYTES + lane * BOX * 128;
#pragma unroll
                    for (int h = 0; h < HALVES; h++)
                        copy(at + h * TILE * 128, &of_k, head * DIM + h * 64, now, full + stage);
#pragma unroll
                    for (int h = 0; h < HALVES; h++)
                        copy(at + TILE_BYTES + h * TILE * 128, &of_v, head * DIM + h * 64, now, full + stage);
                }
            }
            way = after, span = span_after;
        }
        return;
    }
    if (warp > WARPS) {
        do {
            if (item >= 2) await(taken + item % 2, item / 2 - 1);
            prepare(step, way.b, head, way.newest(Span(lengths[way.b])), heads[item % 2]);
            __syncwarp();
            if (lane == 0) arrive(ready + item % 2);
            item++;
        } while (way.next());
        return;
    }
    do {
        const Span span(lengths[way.b]);
        const Heads& now = heads[item % 2];
        unsigned rows[DIM / 16][4] = {};  // q as the first operand of products
        Seen seen;
        await(ready + item % 2, item / 2);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            if constexpr (ROWS == 16) {
                load(rows[i], shared(now.turned + lane % 16 * WIDE + i * 16 + lane / 16 * 8));
            } else {
                unsigned half[2];
                load(half, shared(now.turned + lane % 8 * WIDE + i * 16 + lane / 8 % 2 * 8));
                rows[i][0] = half[0], rows[i][2] = half[1];
            }
        }
        if (warp == 0 && way.newest(span)) seen.take_newest(now);
        __syncwarp();
        if (lane == 0) arrive(taken + item % 2);
        item++;
        for (int j = way.at; j < way.stop; j++, t++) {
            const int stage = t % STAGES, token = (span.tile + j) * TILE + warp * 16;  // the first of this warp's 16
            const int first = max(span.first - token, 0), last = min(span.last - token, 16);
            const unsigned k_at = ring + stage * 2 * TILE_BYTES, v_at = k_at + TILE_BYTES;
            await(full + stage, t / STAGES);
            if (first < last) {
                unsigned x[DIM / 16][4];
                float s[2][4] = {}, odd[2][4] = {};
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    const int row = warp * 16 + lane / 16 * 8 + lane % 8, piece = i % 4 * 2 + lane / 8 % 2;
                    load(x[i], k_at + (i / 4 * TILE + row) * 128 + (piece ^ lane % 8) * 16);
                }
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    multiply<T>((i % 2 ? odd : s)[0], rows[i], x[i][0], x[i][1]);
                    multiply<T>((i % 2 ? odd : s)[1], rows[i], x[i][2], x[i][3]);
                }
                if (first > 0 || last < 16) {  // whatever lies beside them, a NaN too, stays out
                    for (int i = lane; i < 16 * 8 * HALVES; i += 32) {
                        const int row = i / 8 % 16;
                        const unsigned at = v_at + (i / 128 * TILE + warp * 16 + row) * 128 + i % 8 * 16;
                        if (row < first || row >= last) asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
                    }
                    __syncwarp();
                }
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8, piece = i % 4 * 2 + lane / 16;
                    load_across(x[i], v_at + (i / 4 * TILE + row) * 128 + (piece ^ lane % 8) * 16);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) s[i / 4][i % 4] += odd[i / 4][i % 4];
                seen.take(s, first, last, scale, cap);
                const unsigned p[4] = {both<T>(s[0][0], s[0][1]), ROWS == 16 ? both<T>(s[0][2], s[0][3]) : 0,
                                       both<T>(s[1][0], s[1][1]), ROWS == 16 ? both<T>(s[1][2], s[1][3]) : 0};
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    multiply<T>(seen.o[2 * i], p, x[i][0], x[i][1]);
                    multiply<T>(seen.o[2 * i + 1], p, x[i][2], x[i][3]);
                }
            }
            hand_back(empty + stage);
        }
        meet();  // what the sequence before has left here has been read
        seen.store(tops + warp * 2 * GROUP, mixed + warp * GROUP * DIM);
        meet();
        const int b = way.b;
        T* const to = out + ((long long)b * HEADS + head * GROUP) * DIM;
        if (way.stop - way.at == way.tiles) {
            merge(step, tops, mixed, to, -1);
            continue;
        }
        merge(step, tops, mixed, to, blockIdx.x * 2 + (way.at == 0));
        __threadfence();
        meet();
        const long long begin = ends[b] - way.tiles, end = ends[b];
        const int first = ((begin + 1) * runs - 1) / all, count = (end * runs - 1) / all - first + 1;
        if (thread == 0) latest = atomicAdd(arrived + b * KV_HEADS + head, 1) == count - 1;
        meet();
        if (latest) {
            __threadfence();
            add_up(step, first, count, head, to);
            if (thread == 0) arrived[b * KV_HEADS + head] = 0;
        }
    } while (way.next());
#endif
}
