// One token of each of n sequences over the paged cache, at the speed at which keys and values are read: from sm_90 on.
//
// All sequences' KV tiles form one list that is split evenly (stream-K): a run for each KV_HEADS blocks, of which
// each takes one key head, so that what lies side by side in the cache is read at one time. A sequence that lies in
// several runs is added up by the block that comes to it last. One warp has TMA bring keys and values to shared memory,
// STAGES tiles of TILE tokens ahead and on into the next sequence; one prepares the next sequence's heads; the others
// take 16 tokens of each tile for all query heads of the key head. With ROTATE the step's newest token is still in q, k
// and v: heads are normed (NORM) and rotated here, key and value are written to the cache and taken from registers.
// Online softmax after FlashAttention-2 (Dao 2023, arXiv 2307.08691), even shares after Stream-K (Osama et al. 2023,
// arXiv 2301.03598).
//
// FP8: the cache has e4m3 codes, and their scales of a block and key head side by side (rope/fp8_cache.py); BOX is SIZE
// then. Codes become f16 between shared memory and the tensor cores.
#include "tma.cuh"
#include "mma.cuh"
#include "half2.cuh"
#include "fp8_cache.cuh"

constexpr int WARPS = TILE / 16, THREADS = WARPS * 32, ALL = THREADS + 64, HALF = DIM / 2;
constexpr int BYTES = FP8 ? 1 : 2;  // of an element in the cache
constexpr int TOKEN_BYTES = DIM * BYTES, RUN_BYTES = TOKEN_BYTES % 128 == 0 ? 128 : TOKEN_BYTES % 64 == 0 ? 64 : 32;
constexpr int RUNS = TOKEN_BYTES / RUN_BYTES;  // of a token: each as wide as one of TMA's swizzles
constexpr int TILE_BYTES = TILE * TOKEN_BYTES, GROUP = HEADS / KV_HEADS;
constexpr int SCALE_BYTES = FP8 ? 2 * TILE : 0;  // of a tile, of each box its keys' and then its values'
constexpr int ROWS = GROUP > 8 ? 16 : 8, WIDE = DIM + 8;  // of q in shared memory: no two of 8 rows in the same banks
constexpr int VECS = RUN_BYTES / 16;                    // of a run
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
// Stream-K: how blocks share out what is read. From here to struct RunIterator: index arithmetic alone, which
// tests/kernels/attention/test_stream_k.py compiles for a CPU, too.
//
// TMA's boxes of all sequences stand in one row, a sequence of which nothing is read as one, and are cut into runs of
// as many boxes each. A bound near a sequence's beginning or end moves there, as a part costs more than what it is
// moved by. Each block finds its two bounds alone; of a sequence that they divide, also which runs have parts of it.
constexpr int PER_TILE = TILE / BOX;  // boxes

struct Span {  // of a sequence: the tokens that are read from the cache
    int length, first, last, start;  // `start`: of the first one's box

    __device__ Span(int length) : length(length) {
        first = WINDOW ? max(length - WINDOW, 0) : 0, last = max(length - ROTATE, 0), start = first / BOX * BOX;
    }
    __device__ int boxes() const { return max((last - start + BOX - 1) / BOX, 1); }
    __device__ int tiles() const { return (boxes() + PER_TILE - 1) / PER_TILE; }
};

struct SplitBound {  // between runs: before box `box` of sequence b. Where that divides b, `count` runs from `first` on have parts
    int b, box, first, count;
};

struct StreamKRuns {  // of `boxes` in `tiles`, as many as are wanted if each has LEAST tiles, so that short sequences stay whole
    int count, each, longer;  // boxes of each run; the first `longer` have one more
    int near;                 // how many boxes a bound is moved by at most: half a tile, and no two meet

    __device__ StreamKRuns(int boxes, int tiles, int wanted) : count(max(min(wanted, tiles / LEAST), 1)) {
        each = boxes / count, longer = boxes - each * count, near = min(PER_TILE / 2, (each - 1) / 2);
    }
    __device__ int begin(int run) const { return each * run + min(run, longer); }
    __device__ int begins_from(int box) const {  // the first run that begins there or later
        const int early = box <= (each + 1) * longer, boxes = each + early;
        return (box - (early ? 0 : longer) + boxes - 1) / boxes;
    }
    // The beginning of `run` in sequence b, whose boxes stand from `at` on.
    __device__ SplitBound bound(int run, int b, int at, int boxes) const {
        SplitBound bound = position(run, b, at, boxes);
        if (bound.box > 0) {
            const int first = begins_from(at + near + 1), last = begins_from(at + boxes - near);
            bound.first = first - 1, bound.count = last - first + 1;
        }
        return bound;
    }
    // The beginning of `run` without the runs that have parts, which takes two divisions.
    __device__ SplitBound position(int run, int b, int at, int boxes) const {
        const int box = begin(run) - at;
        if (box <= near) return {b, 0, 0, 0};
        return box >= boxes - near ? SplitBound{b + 1, 0, 0, 0} : SplitBound{b, box, 0, 0};
    }
};

struct RunIterator {  // of a block through its run, from bounds[0] to bounds[1]: tokens `at` to `stop` of sequence b
    const int* lengths;
    const SplitBound* bounds;
    int b, at, stop;

    __device__ RunIterator(const int* lengths, const SplitBound* bounds) : lengths(lengths), bounds(bounds), b(bounds[0].b) {
        enter(bounds[0].box);
    }
    __device__ void enter(int box) {
        const Span span(lengths[b]);
        at = span.start + box * BOX, stop = b == bounds[1].b ? span.start + bounds[1].box * BOX : span.last;
    }
    __device__ bool next() {
        b++;
        if (b > bounds[1].b || (b == bounds[1].b && bounds[1].box == 0)) return false;
        enter(0);
        return true;
    }
    __device__ bool newest(const Span& span) const { return ROTATE && stop == span.last && span.length > 0; }
};

// A sequence's query heads of one key head, as one warp prepares them for the others, and its newest token. Where FP8,
// each 16 elements are in the order of keys' codes (keys_operand).
struct Heads {
    Operand rotated[ROWS * WIDE];
    T v[DIM];  // where FP8 the newest token's codes
    float scores[16];  // of the newest token
    // FP8 only: `rotated` has queries divided by q_scale; v_exponent is of the newest value's scale.
    float q_scale;
    int v_exponent, unused[2];
};

typedef Vec<T, PAIRS> HeadPart;  // of a head, both halves of a lane

// The lane's number among the LANES of a head. The others have a head's beginning once more and store the same there;
// sums leave them out.
__device__ inline int head_lane() { return threadIdx.x % 32 % LANES; }
__device__ inline float head_sum(float x) { return warp_sum(threadIdx.x % 32 < LANES ? x : 0); }

// The lane's parts of a head as codes, whose scale is returned, and as the cache will give them back.
__device__ inline int round_trip(HeadPart& low, HeadPart& high, Vec<e4m3, PAIRS>& low_codes, Vec<e4m3, PAIRS>& high_codes) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) most = fmaxf(most, fmaxf(fabsf(to_float(low.x[i])), fabsf(to_float(high.x[i]))));
    const int exponent = scale_exponent(warp_max(most));
    const float by = inverse_scale(exponent), back = scale_of(exponent);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        low_codes.x[i] = from_float<e4m3>(to_float(low.x[i]) * by);
        high_codes.x[i] = from_float<e4m3>(to_float(high.x[i]) * by);
        low.x[i] = from_float<T>(to_float(low_codes.x[i]) * back), high.x[i] = from_float<T>(to_float(high_codes.x[i]) * back);
    }
    return exponent;
}

// A sequence's query heads and, as the last one, its key: normed where NORM, then rotated.
__device__ __forceinline__ void norm_and_rotate(const Step& step, int b, HeadPart (&low)[GROUP + 1], HeadPart (&high)[GROUP + 1]) {
    const int at = head_lane() * PAIRS;
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
            for (int i = 0; i < PAIRS; i++)
                scale += to_float(low[g].x[i]) * to_float(low[g].x[i]) + to_float(high[g].x[i]) * to_float(high[g].x[i]);
            scale = rsqrtf(head_sum(scale) / DIM + step.eps);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            float x0 = to_float(low[g].x[i]), x1 = to_float(high[g].x[i]);
            if (NORM) {
                x0 = to_float(from_float<T>(x0 * scale * to_float(weight[at + i])));
                x1 = to_float(from_float<T>(x1 * scale * to_float(weight[HALF + at + i])));
            }
            low[g].x[i] = from_float<T>(x0 * cos[i] - x1 * sin[i]), high[g].x[i] = from_float<T>(x1 * cos[i] + x0 * sin[i]);
        }
    }
}

// A token's key and value, as elements or, where FP8, as codes with scales of_k and of_v.
__device__ __forceinline__ void write_to_cache(const Step& step, long long slot, int head, const HeadPart& k_low,
                                               const HeadPart& k_high, const HeadPart& v_low, const HeadPart& v_high,
                                               const Vec<e4m3, PAIRS> (&codes)[4], int of_k, int of_v) {
    const long long in_cache = (slot * KV_HEADS + head) * DIM + head_lane() * PAIRS;
    if (FP8) {
        e4m3 *const keys = (e4m3*)step.keys + in_cache, *const values = (e4m3*)step.values + in_cache;
        typedef Vec<e4m3, PAIRS> Codes;
        *(Codes*)keys = codes[0], *(Codes*)(keys + HALF) = codes[1];
        *(Codes*)values = codes[2], *(Codes*)(values + HALF) = codes[3];
        unsigned char* const scales = step.scales + (slot / SIZE * KV_HEADS + head) * 2 * SIZE + slot % SIZE;
        if (threadIdx.x % 32 == 0) scales[0] = of_k, scales[SIZE] = of_v;
        return;
    }
    *(HeadPart*)(step.keys + in_cache) = k_low, *(HeadPart*)(step.keys + in_cache + HALF) = k_high;
    *(HeadPart*)(step.values + in_cache) = v_low, *(HeadPart*)(step.values + in_cache + HALF) = v_high;
}

// A sequence's query heads as f16, all of them divided by one power of two (query_exponent).
__device__ inline void store_queries(const HeadPart (&low)[GROUP + 1], const HeadPart (&high)[GROUP + 1], Heads& to) {
    float most = 0;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) most = fmaxf(most, fmaxf(fabsf(to_float(low[g].x[i])), fabsf(to_float(high[g].x[i]))));
    const int exponent = query_exponent(warp_max(most));
    const float by = inverse_scale(exponent);
#pragma unroll
    for (int g = 0; g < GROUP; g++)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int d = head_lane() * PAIRS + i;
            Operand* const place = to.rotated + g * WIDE + d / 16 * 16 + d % 4 / 2 * 8 + d % 16 / 4 * 2 + d % 2;
            place[0] = from_float<Operand>(to_float(low[g].x[i]) * by);
            place[HALF] = from_float<Operand>(to_float(high[g].x[i]) * by);
        }
    if (threadIdx.x % 32 == 0) to.q_scale = scale_of(exponent);
}

// Prefetches what prepare() reads in addition to q, k and v, which grid_wait() need not have been passed for.
__device__ __forceinline__ void prefetch_rotation(const Step& step, int b) {
    const int at = head_lane() * PAIRS;
    prefetch_line(step.cos + (long long)b * DIM + at), prefetch_line(step.sin + (long long)b * DIM + HALF + at);
    prefetch_line(step.slots + b);
    if (NORM) {
        prefetch_line(step.q_weight + at), prefetch_line(step.q_weight + HALF + at);
        prefetch_line(step.k_weight + at), prefetch_line(step.k_weight + HALF + at);
    }
}

// Heads are normed and rotated where ROTATE; with `newest` its key and value go to the cache.
__device__ inline void prepare(const Step& step, int b, int head, bool newest, Heads& to) {
    const int lane = threadIdx.x % 32, at = head_lane() * PAIRS;
    typedef HeadPart Part;
    Part low[GROUP + 1], high[GROUP + 1], v_low, v_high;  // the last one: the key
    const long long slot = newest ? step.slots[b] : -1;
#pragma unroll
    for (int g = 0; g < GROUP + ROTATE; g++) {
        const T* x = step.q + (long long)b * step.q_row + (head * GROUP + g) * DIM;
        if (g == GROUP) x = step.k + (long long)b * step.k_row + head * DIM;
        low[g] = *(const Part*)(x + at), high[g] = *(const Part*)(x + HALF + at);
    }
    if (ROTATE) {
        const T* x = step.v + (long long)b * step.v_row + head * DIM + at;
        v_low = *(const Part*)x, v_high = *(const Part*)(x + HALF);
        norm_and_rotate(step, b, low, high);
    }
    if (FP8) {
        store_queries(low, high, to);
    } else {
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            Operand* const rotated = to.rotated + g * WIDE;
            *(Part*)(rotated + at) = low[g], *(Part*)(rotated + HALF + at) = high[g];
        }
    }
    if (!newest) return;
    Vec<e4m3, PAIRS> codes[4];
    int of_k = 0, of_v = 0;
    if (FP8) {
        of_k = round_trip(low[GROUP], high[GROUP], codes[0], codes[1]);
        of_v = round_trip(v_low, v_high, codes[2], codes[3]);
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        float s = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            s += to_float(low[g].x[i]) * to_float(low[GROUP].x[i]) + to_float(high[g].x[i]) * to_float(high[GROUP].x[i]);
        s = head_sum(s);
        if (lane == 0) to.scores[g] = score<SOFTCAP>(s, step.scale, step.softcap);
    }
    if (slot >= 0) write_to_cache(step, slot, head, low[GROUP], high[GROUP], v_low, v_high, codes, of_k, of_v);
    if (FP8) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            v_low.x[i] = from_float<T>(to_float(codes[2].x[i])), v_high.x[i] = from_float<T>(to_float(codes[3].x[i]));
        to.v_exponent = of_v;
    }
    *(Part*)(to.v + at) = v_low, *(Part*)(to.v + HALF + at) = v_high;
}

// Operands in e4m3. Codes become f16 by one instruction for two, whatever T is: f16 has every code. ldmatrix moves
// pairs of bytes, so that an operand of 16 elements comes in an order of its own. Keys, tokens by elements: of each
// four neighbours the first two in one half of the 16 and the others in the other, which store_queries does to queries,
// too. Values, elements by tokens: row r has element 2 r, row 8 + r the next one, which OnlineSoftmax::element undoes.

// Scales of a lane's two tokens of a warp's 16: lane / 4 and 8 below. No element is multiplied by its scale: scores are
// by those of keys; those of values are added to scores as logarithms, so that a token's weight has its scale in it
// (OnlineSoftmax).
struct TileScales {
    float keys[2], logs[2], inverses[2];  // scales of keys; of values their logarithms to the base 2, and inverses

    // from: of the tile; token: the first of the 16, of which those from `first` to `last` count.
    __device__ TileScales(const unsigned char* from, int token, int first, int last) {
#pragma unroll
        for (int h = 0; FP8 && h < 2; h++) {
            const int i = h * 8 + threadIdx.x % 32 / 4, at = token + i;
            const unsigned char* const exponents = from + at / BOX * 2 * BOX + at % BOX;
            const bool counts = i >= first && i < last;
            const int of_value = counts ? exponents[BOX] : 127;
            keys[h] = counts ? scale_of(exponents[0]) : 1, logs[h] = of_value - 127, inverses[h] = inverse_scale(of_value);
        }
    }
};

// 16 tokens by elements 16 i to 16 i + 15, of what ldmatrix has loaded.
template <int N> __device__ inline void keys_operand(unsigned (&a)[4], const unsigned (&x)[N][4], int i) {
    if constexpr (FP8) {
#pragma unroll
        for (int h = 0; h < 2; h++) e4m3x4_to_f16(x[i / 2][i % 2 * 2 + h], a[h], a[2 + h]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = x[i][j];
    }
}

// Elements 16 i to 16 i + 15 by 16 tokens, of what ldmatrix_transposed has loaded.
template <int N> __device__ inline void values_operand(unsigned (&a)[4], const unsigned (&x)[N][4], int i) {
    if constexpr (FP8) {
#pragma unroll
        for (int h = 0; h < 2; h++)  // an element of both tokens, then the next one's
            e4m3x4_to_f16(__byte_perm(x[i / 2][i % 2 + 2 * h], 0, 0x3120), a[2 * h], a[2 * h + 1]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = x[i][j];
    }
}

// The softmax of GROUP heads over what one warp has seen, tokens as rows and heads as columns: of each 8 heads a lane
// has the two from lane % 4 * 2 on, of each 16 elements of a value the two of `element`: those at lane / 4 and 8 below,
// or where FP8 neighbours, as values_operand hands them over. Where FP8, `o` adds up codes, and a token's weight and
// `top` have its value's scale in them, which `sum` has not: o / sum is the mean of values.
struct OnlineSoftmax {
    float top[ROWS / 8][2], sum[ROWS / 8][2], o[DIM / 16][ROWS / 8][4];

    __device__ static int element(int j) {
        const int lane = threadIdx.x % 32;
        return FP8 ? lane / 4 * 2 + j : lane / 4 + j * 8;
    }
    __device__ OnlineSoftmax() {
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            top[h][0] = top[h][1] = MINUS_INFINITY, sum[h][0] = sum[h][1] = 0;
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[i][h][j] = 0;
        }
    }
    __device__ void take_newest(const Heads& heads) {
        const int lane = threadIdx.x % 32;
        const float log = FP8 ? heads.v_exponent - 127 : 0, inverse = FP8 ? inverse_scale(heads.v_exponent) : 1;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int head = h * 8 + lane % 4 * 2 + j;
                top[h][j] = head < GROUP ? heads.scores[head] + log : 0, sum[h][j] = lane < 4 ? inverse : 0;
            }
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[i][h][j] = to_float(heads.v[i * 16 + element(j / 2)]);
        }
    }
    // 16 tokens, of which those from `from` to `to` count: p will be their weights as the second operand of matmuls.
    __device__ void take(float (&s)[2][4], int from, int to, float scale, float softcap, const TileScales& by,
                         unsigned (&p)[ROWS / 8][2]) {
        const int lane = threadIdx.x % 32;
        const float inverses[2] = {FP8 ? by.inverses[0] : 1, FP8 ? by.inverses[1] : 1};
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = i / 2 * 8 + lane / 4;
                float y = score<SOFTCAP>(FP8 ? s[h][i] * by.keys[i / 2] : s[h][i], scale, softcap);
                if (FP8) y += by.logs[i / 2];
                s[h][i] = token >= from && token < to ? y : MINUS_INFINITY;
            }
            float best[2] = {fmaxf(s[h][0], s[h][2]), fmaxf(s[h][1], s[h][3])};
            across(best);
            float shrink[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                best[j] = fmaxf(best[j] - LIFT, top[h][j]);
                shrink[j] = exp2_approx(top[h][j] - best[j]);  // some token counts: best is a number
                top[h][j] = best[j];
                s[h][j] = exp2_approx(s[h][j] - best[j]), s[h][2 + j] = exp2_approx(s[h][2 + j] - best[j]);
                sum[h][j] = sum[h][j] * shrink[j] + s[h][j] * inverses[0] + s[h][2 + j] * inverses[1];
            }
            p[h][0] = transpose_8x8(pack<Operand>(s[h][0], s[h][1])), p[h][1] = transpose_8x8(pack<Operand>(s[h][2], s[h][3]));
            if (!__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) continue;
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[i][h][j] *= shrink[j % 2];
        }
    }
    // The largest of the lanes with the same heads: half of them look for one's, half for the other's.
    __device__ static void across(float (&best)[2]) {
        const bool upper = threadIdx.x & 16;
        float mine = upper ? best[1] : best[0], other = upper ? best[0] : best[1];
        mine = fmaxf(mine, __shfl_xor_sync(~0u, other, 16));
        mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 8));
        mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 4));
        other = __shfl_xor_sync(~0u, mine, 16);
        best[0] = upper ? other : mine, best[1] = upper ? mine : other;
    }
    // To shared memory: tops and sums [2, GROUP], values [GROUP, DIM].
    __device__ void store(float* tops, float* values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float all = sum[h][j];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) all += __shfl_xor_sync(~0u, all, step);
                const int head = h * 8 + lane % 4 * 2 + j;
                if (head >= GROUP) continue;
                if (lane < 4) tops[head] = top[h][j], tops[GROUP + head] = all;
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    float* const to = values + head * DIM + i * 16;
                    to[element(0)] = o[i][h][j], to[element(1)] = o[i][h][2 + j];
                }
            }
    }
};

constexpr int SHARE = 2 * PAIRS;  // of a head's elements, of a lane
typedef Vec<float, SHARE> Mean;

struct Part {  // of what is known of a head: the lane's share of the mean of values, and its weight's logarithm
    Mean mean;
    float weight;
};

// Loads what those warps have stored of head g.
__device__ inline Part merge(const float* tops, const float* values, int g) {
    Part part = {{}, MINUS_INFINITY};
    float top = MINUS_INFINITY, sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * 2 * GROUP + g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float by = top == MINUS_INFINITY ? 0 : exp2_approx(tops[w * 2 * GROUP + g] - top);
        const float* from = values + (w * GROUP + g) * DIM + head_lane() * SHARE;
        const auto y = *(const Mean*)from;
        sum += by * tops[(w * 2 + 1) * GROUP + g];
#pragma unroll
        for (int d = 0; d < SHARE; d++) part.mean.x[d] += by * y.x[d];
    }
    const float by = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int d = 0; d < SHARE; d++) part.mean.x[d] *= by;
    if (sum > 0) part.weight = top + log2f(sum);
    return part;
}

__device__ inline void store_out(T* to, const Part& part) {
    Vec<unsigned, SHARE / 2> y;
#pragma unroll
    for (int d = 0; d < SHARE / 2; d++) y.x[d] = pack<T>(part.mean.x[2 * d], part.mean.x[2 * d + 1]);
    *(Vec<unsigned, SHARE / 2>*)(to + head_lane() * SHARE) = y;
}

// Index at which a run's part of a sequence is stored that begins there, as a run's last one may, or does not, as its
// first one may.
__device__ inline int place(int run, int head, bool begins, int g) {
    return ((run * KV_HEADS + head) * 2 + begins) * GROUP + g;
}

__device__ inline void store_part(const Step& step, int place, const Part& part) {
    const int lane = threadIdx.x % 32;
    *(Mean*)(step.parts + place * DIM + head_lane() * SHARE) = part.mean;
    if (lane == 0) step.sums[place] = part.weight;
}

__device__ inline Mean load_mean(const Step& step, int place) {
    constexpr int AT_ONCE = SHARE < 4 ? 2 : 4;
    Mean mean;
    const float* from = step.parts + place * DIM + head_lane() * SHARE;
#pragma unroll
    for (int d = 0; d < SHARE; d += AT_ONCE)
        if constexpr (AT_ONCE == 2) {
            const float2 y = __ldcg((const float2*)(from + d));
            mean.x[d] = y.x, mean.x[d + 1] = y.y;
        } else {
            const float4 y = __ldcg((const float4*)(from + d));
            mean.x[d] = y.x, mean.x[d + 1] = y.y, mean.x[d + 2] = y.z, mean.x[d + 3] = y.w;
        }
    return mean;
}

__device__ inline Part load_part(const Step& step, int place) {
    return {load_mean(step, place), __ldcg(step.sums + place)};
}

// All of a sequence's head g: `part` is its beginning, the other parts have been stored. Of 32 parts at a time a lane
// each has the weight, and two batches of means are under way.
__device__ inline Part add_up(const Step& step, Part part, const SplitBound& divided, int head, int g) {
    constexpr int BATCH = 32 / SHARE, APART = KV_HEADS * 2 * GROUP;  // of two runs' places
    const int lane = threadIdx.x % 32;
    float sum = 0;  // to be added up over the lanes
#pragma unroll 1
    for (int begin = 1; begin < divided.count; begin += 32) {
        const int first = place(divided.first + begin, head, false, g), left = divided.count - begin;
        Mean means[2][BATCH];
        auto load = [&](int batch) {
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                means[batch % 2][j] = {};
                const int i = batch * BATCH + j;
                if (i < left) means[batch % 2][j] = load_mean(step, first + i * APART);
            }
        };
        const float mine = lane < left ? __ldcg(step.sums + first + lane * APART) : MINUS_INFINITY;
        load(0), load(1);
        const float top = fmaxf(part.weight, warp_max(mine));
        const float old = part.weight == MINUS_INFINITY ? 0 : exp2_approx(part.weight - top);
        const float by = mine == MINUS_INFINITY ? 0 : exp2_approx(mine - top);
        sum = (begin > 1 ? sum * old : lane == 0 ? old : 0) + by;  // of `part` itself 1
        part.weight = top;
#pragma unroll
        for (int d = 0; d < SHARE; d++) part.mean.x[d] *= old;
#pragma unroll
        for (int batch = 0; batch < 32 / BATCH; batch++) {
            if (batch * BATCH >= left) break;
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const float of_part = __shfl_sync(~0u, by, batch * BATCH + j);
#pragma unroll
                for (int d = 0; d < SHARE; d++)
                    part.mean.x[d] = fmaf(of_part, means[batch % 2][j].x[d], part.mean.x[d]);
            }
            if (batch + 2 < 32 / BATCH) load(batch + 2);
        }
    }
    sum = warp_sum(sum);
    const float by = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int d = 0; d < SHARE; d++) part.mean.x[d] *= by;
    if (SINKS && sum > 0) part.weight += log2f(sum);
    return part;
}

// All of a sequence's head, whose sink takes part in its softmax: a logit without a value.
__device__ inline Part with_sink(Part part, float sink) {
    const float by = 1 / (1 + exp2_approx(sink * LOG2_E - part.weight));  // 0 of an empty sequence
#pragma unroll
    for (int d = 0; d < SHARE; d++) part.mean.x[d] *= by;
    return part;
}

// A warp takes 16 tokens of a tile of keys and values in shared memory.
constexpr int LOADS = TOKEN_BYTES / 32;                // of 16 tokens by 32 bytes
typedef unsigned Fragments[LOADS][4];                 // keys or values, as ldmatrix loads them
typedef unsigned QueryFragments[DIM / 16][ROWS / 4];  // q as the second operand of matmuls, of each 8 heads two

// Offset of 16 bytes of a token's run in a tile, in which the runs of a token stand side by side: TMA's
// swizzle permutes a run's 16-byte vectors by the number of its 128 bytes, which are 8 / VECS runs. So 8 tokens'
// vectors lie in different banks where RUNS is odd.
__device__ inline unsigned smem_offset(int token, int run, int vec) {
    const int at = token * RUNS + run;
    return at * RUN_BYTES + (vec ^ at / (8 / VECS) % VECS) * 16;
}

__device__ __forceinline__ void load_queries(QueryFragments& queries, const Heads& heads, int lane) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
        ldmatrix(queries[i],
                 smem_address(heads.rotated + (lane / 16 * 8 + lane % 8) % ROWS * WIDE + i * 16 + lane / 8 % 2 * 8));
}

__device__ __forceinline__ void load_keys(Fragments& x, unsigned tile, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8, vec = i * 2 % VECS + lane / 16;
        ldmatrix(x[i], tile + smem_offset(row, i * 2 / VECS, vec));
    }
}

__device__ __forceinline__ void load_values(Fragments& x, unsigned tile, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int row = warp * 16 + lane / 16 * 8 + lane % 8, vec = i * 2 % VECS + lane / 8 % 2;
        ldmatrix_transposed(x[i], tile + smem_offset(row, i * 2 / VECS, vec));
    }
}

// Values of tokens that do not count become zeros: whatever lies there, a NaN too, stays out.
__device__ __forceinline__ void clear_values(unsigned tile, int first, int last, int warp, int lane) {
    for (int i = lane; i < 16 * VECS * RUNS; i += 32) {
        const int row = i / VECS % 16;
        if (row < first || row >= last) zero_smem(tile + smem_offset(warp * 16 + row, i / (16 * VECS), i % VECS));
    }
    __syncwarp();
}

// s, which is zero: scores of 8 heads each. Those of 8 alone are summed up by even and by odd i, then both.
__device__ __forceinline__ void compute_scores(float (&s)[2][4], const Fragments& x, const QueryFragments& queries) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        unsigned keys[4];
        keys_operand(keys, x, i);
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++)
            mma<Operand>(s[ROWS == 16 ? h : i % 2], keys, queries[i][2 * h], queries[i][2 * h + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][i] += ROWS == 8 ? s[1][i] : 0;
}

// Adds values times their weights p.
__device__ __forceinline__ void add_values(OnlineSoftmax& softmax, const Fragments& x,
                                           const unsigned (&p)[ROWS / 8][2]) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        unsigned values[4];
        values_operand(values, x, i);
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) mma<Operand>(softmax.o[i][h], values, p[h][0], p[h][1]);
    }
}

static_assert(!FP8 || BOX == SIZE, "a box has its block's scales");
static_assert(DIM % (32 / BYTES) == 0 && LANES <= 32, "heads are of whole matmuls, and of at most 256 elements");
static_assert(FEW * RUNS % 8 == 0 && BOX % FEW == 0, "a box is of whole swizzles");
static_assert(1024 + STAGES * (2 * TILE_BYTES + SCALE_BYTES) + WARPS * GROUP * (DIM + 2) * 4 + 2 * sizeof(Heads) +
                      SEQUENCES * 4 == SMEM_BYTES,
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

struct RunStart {  // where a run begins: in sequence b, whose boxes stand from `at` on
    int b, at, boxes;
};

// How sequences are shared out, and where this block's run begins and ends, if there is one for it. `kept`: all
// lengths, for all threads to see.
__device__ inline StreamKRuns find_run(const OwnLengths& own, int n, int wanted, int run, int* kept, RunStart* ends) {
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

struct SharedState {  // what a block's warps tell each other, and the bounds of its run
    Barrier *full, *empty, *ready, *taken, *bounds_ready;  // [STAGES] twice, [2] twice, one
    SplitBound* bounds;                               // [2]
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
    mbarrier_init(state.bounds_ready, 1);
    fence_mbarrier_init();
}

__device__ __forceinline__ void prefetch_maps(const KVMaps& maps) {
    prefetch_tensor_map(maps.keys), prefetch_tensor_map(maps.values);
    prefetch_tensor_map(maps.few_keys), prefetch_tensor_map(maps.few_values);
}

// Rows without a head stay so.
__device__ __forceinline__ void clear_heads(Heads* heads, int thread) {
    constexpr int CLEARED = ROWS * WIDE / 8;  // vectors of 16 bytes
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
                                           const SharedState& state, RunIterator& run_at, int head, int lane) {
    constexpr int AHEAD = 32 * BOX;  // tokens that are looked up at once
    auto look_up = [&](bool more) {  // the block of this lane's box, of those from run_at.at on
        const int token = run_at.at + lane * BOX;
        return load_if(step.tables + (long long)run_at.b * step.table_row + token / SIZE, more && token < run_at.stop);
    };
    int block = look_up(true), t = 0;
    for (bool more = true; more;) {
        int at = run_at.at, first = 0;
        const int stop = min(run_at.stop, at + AHEAD), row = block * SIZE + (at + lane * BOX) % SIZE;
        run_at.at += AHEAD, more = run_at.at < run_at.stop || run_at.next();
        block = look_up(more);  // what comes next is asked for beforehand
        do {  // once where there is nothing, too
            load_tile(step, maps, buffers, state, t++, row, first, min(stop - at, TILE), head);
            at += TILE, first += PER_TILE;
        } while (at < stop);
    }
}

// The warp that prepares each sequence's heads for those that attend.
__device__ __forceinline__ void prepare_heads(const Step& step, const Buffers& buffers, const SharedState& state, RunIterator& run_at,
                                              int head, int lane) {
    int item = 0;
    do {
        if (item >= 2) mbarrier_wait(state.taken + item % 2, item / 2 - 1);
        prepare(step, run_at.b, head, run_at.newest(Span(buffers.lengths[run_at.b])), buffers.heads[item % 2]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(state.ready + item % 2);
        item++;
    } while (run_at.next());
}

// Writes what the block's warps have stored of a sequence to `out`. Where other runs have parts of it, too, the block
// that comes to it last adds them up; the others store theirs.
__device__ __forceinline__ void finish_sequence(const Step& step, const Buffers& buffers, const SharedState& state,
                                                const RunIterator& run_at, const Span& span, int run, int head, int warp) {
    const bool begins = run_at.at == span.start, whole = begins && run_at.stop == span.last;
    const SplitBound& divided = state.bounds[begins];  // if not `whole`
    int* const count = step.arrived + run_at.b * KV_HEADS + head;
    T* const to = step.out + ((long long)run_at.b * HEADS + head * GROUP) * DIM;
    if (begins && !whole) mbarrier_wait(state.bounds_ready, 0);
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

// Attention of the other warps over the run, each to 16 tokens of every tile.
__device__ __forceinline__ void attend_run(const Step& step, const Buffers& buffers, const SharedState& state, RunIterator& run_at,
                                           int run, int head, int warp, int lane) {
    int t = 0, item = 0;
    do {
        const Span span(buffers.lengths[run_at.b]);
        const Heads& now = buffers.heads[item % 2];
        QueryFragments queries;
        OnlineSoftmax softmax;
        mbarrier_wait(state.ready + item % 2, item / 2);
        load_queries(queries, now, lane);
        if (warp == 0 && run_at.newest(span)) softmax.take_newest(now);
        const float scale = FP8 ? step.scale * now.q_scale : step.scale;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(state.taken + item % 2);
        item++;
        int at = run_at.at;
        do {  // once where there is nothing, too
            const int stage = t % STAGES, token = at + warp * 16;  // the first of this warp's 16
            const int first = WINDOW ? max(span.first - token, 0) : 0, last = min(run_at.stop - token, 16);
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
        } while (at < run_at.stop);
        block_sync<THREADS>(1);  // what the sequence before has left here has been read
        softmax.store(buffers.tops + warp * 2 * GROUP, buffers.mixed + warp * GROUP * DIM);
        block_sync<THREADS>(1);
        finish_sequence(step, buffers, state, run_at, span, run, head, warp);
    } while (run_at.next());
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
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES], ready[2], taken[2], bounds_ready;
    __shared__ SplitBound bounds[2];
    __shared__ RunStart ends[2];
    __shared__ int complete, latest;
    const SharedState state = {full, empty, ready, taken, &bounds_ready, bounds, &complete, &latest};
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
    auto bound = [&](int end) { return runs.bound(run + end, ends[end].b, ends[end].at, ends[end].boxes); };
    auto position = [&](int end) { return runs.position(run + end, ends[end].b, ends[end].at, ends[end].boxes); };
    const SplitBound of_run[2] = {position(0), position(1)};
    RunIterator run_at(buffers.lengths, of_run);
    if (warp == WARPS) {
        load_tiles(step, maps, buffers, state, run_at, head, lane);
        // Later runs begin with the other parts of this one's last sequence: most often they are stored by now.
        grid_wait();
        const SplitBound last = bound(1);
        if (lane == 0 && last.box > 0) {
            *state.complete = counted(arrived + last.b * KV_HEADS + head) == last.count - 1;
            mbarrier_arrive(state.bounds_ready);
        }
        return;
    }
    if (ROTATE && warp > WARPS) prefetch_rotation(step, run_at.b);
    grid_wait();
    if (warp > WARPS) return prepare_heads(step, buffers, state, run_at, head, lane);
    if (thread == 0 || thread == 32) bounds[thread / 32] = bound(thread / 32);  // for finish_sequence()
    attend_run(step, buffers, state, run_at, run, head, warp, lane);
#endif
}
