// The newest query_len tokens of each of B sequences attend to their keys in a paged cache, with an online softmax in
// f32. All queries of a key head's tokens, of all query heads and all tokens of the sequence, read them together.
//
// The tokens that all sequences read, times the key heads, stand in one row that the threads share out evenly, whatever
// the lengths are, which are read here: a recorded step is replayed with other ones. A thread may so begin and end in
// the middle of a sequence: what it has of the first and of the last one lies in `partial` then, and `merge` adds up.

#include "op.h"
#include "simd.h"
#include "e4m3.h"

struct Decode {
    const void *q, *keys, *values;  // q [B * query_len, heads, dim]; keys, values [blocks, block_size, kv_heads, dim]
    const int32_t *tables, *lengths;  // [B, table_pitch], [B]; length 0 gives zeros
    void* out;  // [B * query_len, heads, dim]
    float* partial;  // [threads, 2, queries, 2 + dim]: per query the largest score, the sum and the weighted values
    const float* sinks;  // [heads], or null
    const uint8_t* scales;  // of e4m3 codes, [blocks, kv_heads, 2, block_size]
    int64_t sequences, heads, kv_heads, dim, block_size, table_pitch, q_pitch, window, query_len;
    double scale, softcap;

    // Tokens of a sequence that no query sees: those before the first one's window.
    int64_t unseen(int64_t length) const {
        int64_t before = length - window - query_len + 1;
        return window && before > 0 ? before : 0;
    }
    int64_t queries() const { return query_len * heads / kv_heads; }
    // Query `g` of a key head: token by token, and of each its query heads. Where it stands in q and out.
    int64_t row(int64_t sequence, int64_t kv_head, int64_t g) const {
        int64_t group = heads / kv_heads;
        return (sequence * query_len + g / group) * heads + kv_head * group + g % group;
    }
};

constexpr int64_t MAX_DIM = 512;
constexpr int MAX_GROUP = 16;  // queries of a key head that are computed together
constexpr int TILE = 32;        // tokens; a multiple of LANES
constexpr int64_t LEAST = 128;  // tokens that a thread is worth

// A sequence's tokens of one key head.
struct Item {
    int64_t sequence, kv_head, first, count;  // `first` is the first query's window's
    int64_t begin;                            // its first token's place in the row of all
};

// All items in order, with what of them lies in places low..high - 1.
template <typename F> INLINE void items_of(const Decode& a, F visit) {
    int64_t begin = 0;
    for (int64_t b = 0; b < a.sequences; b++) {
        int64_t length = a.lengths[b], first = a.unseen(length);
        for (int64_t h = 0; h < a.kv_heads; h++, begin += length - first)
            visit(Item{b, h, first, length - first, begin});
    }
}

struct Positions {
    int64_t total = 0, parts;

    Positions(const Decode& a, int threads) {
        for (int64_t b = 0; b < a.sequences; b++) {
            int64_t length = a.lengths[b];
            total += (length - a.unseen(length)) * a.kv_heads;
        }
        int64_t worth = total / LEAST;
        parts = worth < 1 ? 1 : worth < threads ? worth : threads;
    }

    int64_t of(int64_t part) const { return total * part / parts; }
};

// Sums of `count` <= TILE tokens for G queries. C: the cache's elements.
template <typename C> struct State {
    float q[MAX_GROUP][MAX_DIM];  // times the scale, zeros behind dim
    float values[MAX_GROUP][MAX_DIM];
    float top[MAX_GROUP], sum[MAX_GROUP];
    float scores[MAX_GROUP][TILE];
    const C *k[TILE], *v[TILE];
    float of_k[TILE], of_v[TILE];  // scales, of codes
};
template <typename C> constexpr bool CODES = false;
template <> inline constexpr bool CODES<e4m3> = true;

template <int R, typename C> INLINE void score(State<C>& s, int g, int t, int64_t dim) {
    Vec total[R][4] = {};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        Vec k[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) k[j] = load(s.k[t + j] + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) total[r][j] = load(s.q[g + r] + i) * k[j] + total[r][j];
    }
    if (i < dim)
        for (int j = 0; j < 4; j++) {
            Vec k = load(s.k[t + j] + i, dim - i);
            for (int r = 0; r < R; r++) total[r][j] = load(s.q[g + r] + i) * k + total[r][j];
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums(total[r], s.scores[g + r] + t);
}

template <int R, typename C> INLINE void mix(State<C>& s, int g, int count, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) {
        Vec total[R];
        for (int r = 0; r < R; r++) total[r] = load(s.values[g + r] + i);
        if (i + LANES <= dim)
            for (int t = 0; t < count; t++) {
                Vec v = load(s.v[t] + i);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) total[r] = s.scores[g + r][t] * v + total[r];
            }
        else
            for (int t = 0; t < count; t++) {
                Vec v = load(s.v[t] + i, dim - i);
                for (int r = 0; r < R; r++) total[r] = s.scores[g + r][t] * v + total[r];
            }
        for (int r = 0; r < R; r++) store(s.values[g + r] + i, total[r]);
    }
}

// Scores become weights; what has been summed shrinks where a larger score has come. Of the tile's `count` tokens the
// query sees low..high - 1.
template <typename C> INLINE void weigh(const Decode& a, State<C>& s, int g, int low, int high, int count) {
    float* scores = s.scores[g];
    if (low >= high) {
        for (int t = 0; t < count; t++) scores[t] = 0;
        return;
    }
    if (CODES<C>)
        for (int t = 0; t < TILE; t += LANES) store(scores + t, load(scores + t) * load(s.of_k + t));
    for (int t = 0; t < low; t++) scores[t] = -__builtin_inff();  // exp makes next to nothing of it
    for (int t = high; t < TILE; t++) scores[t] = -__builtin_inff();
    Vec best = fill(s.top[g]);
    for (int t = 0; t < count; t += LANES) {
        Vec x = load(scores + t);
        if (a.softcap != 0) {
            Vec below = (float)a.softcap * tanh(x / (float)a.softcap);
            for (int j = 0; j < LANES; j++) x[j] = t + j >= low && t + j < high ? below[j] : x[j];
            store(scores + t, x);
        }
        best = max(best, x);
    }
    float top = largest(best);
    if (top > s.top[g]) {
        Vec shrink = exp(fill(s.top[g] - top));
        s.sum[g] *= shrink[0];
        for (int64_t i = 0; i < a.dim; i += LANES) store(s.values[g] + i, load(s.values[g] + i) * shrink);
        s.top[g] = top;
    }
    Vec total = {};
    for (int t = 0; t < count; t += LANES) {
        Vec x = exp(load(scores + t) - top);
        store(scores + t, CODES<C> ? x * load(s.of_v + t) : x);
        total += x;
    }
    s.sum[g] += sum(total);
}

// Tokens from..to - 1 of an item for its queries at..at + group - 1.
template <typename T, typename C> void attend(const Decode& a, const Item& item, int64_t from, int64_t to,
                                              int64_t first_query, int group, State<C>& s) {
    int64_t ends[MAX_GROUP];  // of each query, behind the tokens that it sees
    for (int g = 0; g < group; g++) {
        int64_t row = a.row(item.sequence, item.kv_head, first_query + g);
        const T* q = (const T*)a.q + row / a.heads * a.q_pitch + row % a.heads * a.dim;
        ends[g] = a.lengths[item.sequence] - a.query_len + 1 + row / a.heads % a.query_len;
        for (int64_t i = 0; i < a.dim; i++) s.q[g][i] = widen(q[i]) * (float)a.scale;
        for (int64_t i = a.dim; i < MAX_DIM && i % LANES; i++) s.q[g][i] = 0;
        memset(s.values[g], 0, (a.dim + LANES - 1) / LANES * LANES * 4);
        s.top[g] = -__builtin_inff();
        s.sum[g] = 0;
    }
    const int32_t* table = a.tables + item.sequence * a.table_pitch;
    int64_t pitch = a.kv_heads * a.dim;
    for (int64_t at = from; at < to; at += TILE) {
        int count = to - at < TILE ? to - at : TILE;
        for (int t = 0; t < TILE; t++) {
            int64_t position = item.first + at + (t < count ? t : count - 1);  // the last one stands for those behind
            int64_t slot = (int64_t)table[position / a.block_size] * a.block_size + position % a.block_size;
            s.k[t] = (const C*)a.keys + slot * pitch + item.kv_head * a.dim;
            s.v[t] = (const C*)a.values + slot * pitch + item.kv_head * a.dim;
            if (!CODES<C>) continue;
            const uint8_t* scales = a.scales + (slot / a.block_size * a.kv_heads + item.kv_head) * 2 * a.block_size;
            s.of_k[t] = scale_of(scales[slot % a.block_size]);
            s.of_v[t] = scale_of(scales[a.block_size + slot % a.block_size]);
        }
        int g = 0;
        for (; g + 2 <= group; g += 2)
            for (int t = 0; t < count; t += 4) score<2>(s, g, t, a.dim);
        for (; g < group; g++)
            for (int t = 0; t < count; t += 4) score<1>(s, g, t, a.dim);
        for (g = 0; g < group; g++) {
            int64_t position = item.first + at, high = ends[g] - position, low = a.window ? high - a.window : 0;
            weigh(a, s, g, low > 0 ? low : 0, high < count ? high : count, count);
        }
        for (g = 0; g + 4 <= group; g += 4) mix<4>(s, g, count, a.dim);
        for (; g < group; g++) mix<1>(s, g, count, a.dim);
    }
}

template <typename T> INLINE void finish(const Decode& a, const Item& item, int64_t g, const float* values, float top,
                                         float sum) {
    int64_t row = a.row(item.sequence, item.kv_head, g);
    if (a.sinks) sum += exp(fill(a.sinks[row % a.heads] - top))[0];
    T* out = (T*)a.out + row * a.dim;
    for (int64_t i = 0; i < a.dim; i++) out[i] = narrow<T>(values[i] / sum);
}

template <typename T, typename C> void decode(const Decode& a, int part, int threads) {
    Positions positions(a, threads);
    if (part >= positions.parts) return;
    int64_t low = positions.of(part), high = positions.of(part + 1), queries = a.queries();
    State<C> s;
    items_of(a, [&](const Item& item) {
        if (item.count == 0 && part == 0)
            for (int64_t g = 0; g < queries; g++)
                memset((T*)a.out + a.row(item.sequence, item.kv_head, g) * a.dim, 0, a.dim * sizeof(T));
        int64_t from = item.begin < low ? low - item.begin : 0;
        int64_t to = item.begin + item.count > high ? high - item.begin : item.count;
        if (from >= to) return;
        for (int64_t g = 0; g < queries; g += MAX_GROUP) {
            int here = queries - g < MAX_GROUP ? queries - g : MAX_GROUP;
            attend<T, C>(a, item, from, to, g, here, s);
            for (int i = 0; i < here; i++) {
                if (from == 0 && to == item.count) {
                    finish<T>(a, item, g + i, s.values[i], s.top[i], s.sum[i]);
                    continue;
                }
                float* partial = a.partial + ((part * 2 + (from == 0)) * queries + g + i) * (2 + a.dim);
                partial[0] = s.top[i];
                partial[1] = s.sum[i];
                memcpy(partial + 2, s.values[i], a.dim * 4);
            }
        }
    });
}

// Who has the beginning of an item that others go on with adds up.
template <typename T> void merge(const Decode& a, int part, int threads) {
    Positions positions(a, threads);
    if (part + 1 >= positions.parts) return;
    int64_t low = positions.of(part), high = positions.of(part + 1), queries = a.queries(), size = 2 + a.dim;
    items_of(a, [&](const Item& item) {
        int64_t end = item.begin + item.count;
        if (item.begin < low || item.begin >= high || end <= high) return;
        for (int64_t g = 0; g < queries; g++) {
            float* mine = a.partial + ((part * 2 + 1) * queries + g) * size;
            for (int64_t other = part + 1; other < positions.parts && positions.of(other) < end; other++) {
                const float* more = a.partial + (other * 2 * queries + g) * size;
                if (more[1] == 0) continue;  // tokens that this query does not see
                float top = mine[0] > more[0] ? mine[0] : more[0];
                float keep = exp(fill(mine[0] - top))[0], add = exp(fill(more[0] - top))[0];
                for (int64_t i = 1; i < size; i++) mine[i] = mine[i] * keep + more[i] * add;
                mine[0] = top;
            }
            finish<T>(a, item, g, mine + 2, mine[0], mine[1]);
        }
    });
}

#define DECODE(name, T, C)                                                                                   \
    static void name##_of(const Decode& a, int part, int threads) { decode<T, C>(a, part, threads); }          \
    OP(name, name##_of, Decode)
DECODE(decode_f32, float, float)
DECODE(decode_bf16, bf16, bf16)
DECODE(decode_fp8_f32, float, e4m3)
DECODE(decode_fp8_bf16, bf16, e4m3)
TYPED_OP(merge, merge, Decode)
