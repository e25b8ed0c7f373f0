// Queries and keys normed, if there are weights for it, and rotated; keys and values written to the cache. Threads share
// the heads of all tokens: queries', then keys', then values'.

#include "op.h"
#include "simd.h"
#include "e4m3.h"

struct Rope {
    void* q;  // [tokens, heads, dim], in place
    const void *k, *v;  // [tokens, kv_heads, dim]
    const float *cos, *sin;  // [tokens, rotated]
    const void *q_weight, *k_weight;  // [dim]; null: no norm
    void *keys, *values;  // [slots, kv_heads, dim]
    uint8_t* scales;  // of e4m3 codes [blocks, kv_heads, 2, block_size]; null: the cache has q's type
    const int64_t* slots;  // [tokens]; negative: not written
    int64_t tokens, heads, kv_heads, dim, block_size;
    int64_t rotated, interleaved;  // pairs (2i, 2i + 1), or (i, i + rotated / 2)
    int64_t q_pitch, k_pitch, v_pitch;  // elements from token to token
    double eps;
};

constexpr int64_t MAX_DIM = 512;

template <typename T> INLINE void prepare(const Rope& a, int64_t token, const T* x, const T* weight, T* y) {
    float head[MAX_DIM];
    for (int64_t i = 0; i < a.dim; i++) head[i] = widen(x[i]);
    if (weight) {
        Vec total = {};
        int64_t i = 0;
        for (; i + LANES <= a.dim; i += LANES) total = load(head + i) * load(head + i) + total;
        float squares = sum(total);
        for (; i < a.dim; i++) squares += head[i] * head[i];
        float scale = 1 / __builtin_sqrtf(squares / a.dim + (float)a.eps);
        for (i = 0; i < a.dim; i++) head[i] = widen(narrow<T>(head[i] * scale * widen(weight[i])));
    }
    const float *cos = a.cos + token * a.rotated, *sin = a.sin + token * a.rotated;
    int64_t half = a.rotated / 2;
    if (a.interleaved) {
        for (int64_t i = 0; i < half; i++) {
            float even = head[2 * i], odd = head[2 * i + 1];
            y[2 * i] = narrow<T>(even * cos[i] + odd * sin[i]);
            y[2 * i + 1] = narrow<T>(odd * cos[half + i] + even * sin[half + i]);
        }
    } else {
        for (int64_t i = 0; i < half; i++) {
            float low = head[i], high = head[half + i];
            y[i] = narrow<T>(low * cos[i] + high * sin[i]);
            y[half + i] = narrow<T>(high * cos[half + i] + low * sin[half + i]);
        }
    }
    for (int64_t i = a.rotated; i < a.dim; i++) y[i] = narrow<T>(head[i]);
}

// A head to the cache: of keys (part 0) or of values.
template <typename T> INLINE void keep(const Rope& a, const T* x, int64_t slot, int64_t head, int part) {
    int64_t to = (slot * a.kv_heads + head) * a.dim;
    void* codes = part ? a.values : a.keys;
    if (!a.scales) {
        memcpy((T*)codes + to, x, a.dim * sizeof(T));
        return;
    }
    int64_t of_block = (slot / a.block_size * a.kv_heads + head) * 2 + part;
    a.scales[of_block * a.block_size + slot % a.block_size] = quantize(x, a.dim, (e4m3*)codes + to);
}

template <typename T> void rope_and_store_kv(const Rope& a, int part, int parts) {
    int64_t each = a.heads + 2 * a.kv_heads;
    Share share(a.tokens * each, part, parts);
    for (int64_t item = share.first; item < share.last; item++) {
        int64_t t = item / each, h = item % each, slot = a.slots[t];
        if (h < a.heads) {
            T* q = (T*)a.q + t * a.q_pitch + h * a.dim;
            prepare(a, t, q, (const T*)a.q_weight, q);
        } else if (slot >= 0 && h < a.heads + a.kv_heads) {
            int64_t kv = h - a.heads;
            const T* k = (const T*)a.k + t * a.k_pitch + kv * a.dim;
            T rotated[MAX_DIM];
            prepare(a, t, k, (const T*)a.k_weight, rotated);
            keep(a, rotated, slot, kv, 0);
        } else if (slot >= 0) {
            int64_t kv = h - a.heads - a.kv_heads;
            const T* v = (const T*)a.v + t * a.v_pitch + kv * a.dim;
            keep(a, v, slot, kv, 1);
        }
    }
}

TYPED_OP(rope, rope_and_store_kv, Rope)
