// Queries and keys get their head's norm (NORM) and are rotated; keys and values go to their slots of the paged cache.
// A warp does PER heads of a token: Q_HEADS query heads, then KV_HEADS key heads, then as many value heads.
//
// DIM: elements of a head, the first ROTATED of them in pairs: (2i, 2i + 1) where INTERLEAVED, else (i, i + ROTATED / 2).
// V: elements at a time, a divisor of DIM and of ROTATED / 2. C: the cache's element type, or where FP8 its codes' stead:
// they are e4m3, in blocks of SIZE tokens, with `scales` [blocks, KV_HEADS, 2, SIZE]. Rows of q, k and v are q_row, k_row
// and v_row apart.
#include "fp8_cache.cuh"

constexpr int HALF = ROTATED / 2;
constexpr int PAIRS = (HALF / V + 31) / 32;           // vectors of a lane in each half
constexpr int REST = ((DIM - ROTATED) / V + 31) / 32;  // and behind them
typedef Vec<T, V> Vector;
typedef Vec<C, V> Stored;

struct Head {
    Vector first[PAIRS], second[PAIRS], rest[REST ? REST : 1];
};

// V pairs, from the pair `at` on.
__device__ inline void load_pairs(const T* from, int at, Vector& first, Vector& second) {
    if (INTERLEAVED) {
        Vector low = *(const Vector*)(from + 2 * at), high = *(const Vector*)(from + 2 * at + V);
#pragma unroll
        for (int j = 0; j < V; j++) {
            first.x[j] = 2 * j < V ? low.x[2 * j] : high.x[2 * j - V];
            second.x[j] = 2 * j + 1 < V ? low.x[2 * j + 1] : high.x[2 * j + 1 - V];
        }
    } else {
        first = *(const Vector*)(from + at), second = *(const Vector*)(from + HALF + at);
    }
}

__device__ inline Head load(const T* from, int lane) {
    Head h;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int at = (lane + i * 32) * V;
        if (at < HALF) load_pairs(from, at, h.first[i], h.second[i]);
    }
#pragma unroll
    for (int i = 0; i < REST; i++) {
        int at = ROTATED + (lane + i * 32) * V;
        if (at < DIM) h.rest[i] = *(const Vector*)(from + at);
    }
    return h;
}

template <class E> __device__ inline void put(E* to, Vector p) {
    Vec<E, V> y;
#pragma unroll
    for (int j = 0; j < V; j++) y.x[j] = from_float<E>(to_float(p.x[j]));
    *(Vec<E, V>*)to = y;
}

template <class E> __device__ inline void put_pairs(E* to, int at, const Vector& first, const Vector& second) {
    if (INTERLEAVED) {
        Vector low, high;
#pragma unroll
        for (int j = 0; j < V; j++) {
            (2 * j < V ? low.x[2 * j] : high.x[2 * j - V]) = first.x[j];
            (2 * j + 1 < V ? low.x[2 * j + 1] : high.x[2 * j + 1 - V]) = second.x[j];
        }
        put(to + 2 * at, low), put(to + 2 * at + V, high);
    } else {
        put(to + at, first), put(to + HALF + at, second);
    }
}

template <class E> __device__ inline void store(E* to, const Head& h, int lane) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int at = (lane + i * 32) * V;
        if (at < HALF) put_pairs(to, at, h.first[i], h.second[i]);
    }
#pragma unroll
    for (int i = 0; i < REST; i++) {
        int at = ROTATED + (lane + i * 32) * V;
        if (at < DIM) put(to + at, h.rest[i]);
    }
}

__device__ inline float squares(Vector p) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < V; j++) sum += to_float(p.x[j]) * to_float(p.x[j]);
    return sum;
}

__device__ inline void scaled(Vector& p, float scale, const Vector& w) {
#pragma unroll
    for (int j = 0; j < V; j++) p.x[j] = from_float<T>(to_float(p.x[j]) * scale * to_float(w.x[j]));
}

// Rounded to T before it is rotated, as it is where the norm is an operation of its own.
__device__ inline void normalise(Head& h, const T* weight, float eps, int lane) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if ((lane + i * 32) * V < HALF) sum += squares(h.first[i]) + squares(h.second[i]);
#pragma unroll
    for (int i = 0; i < REST; i++)
        if (ROTATED + (lane + i * 32) * V < DIM) sum += squares(h.rest[i]);
    float scale = rsqrtf(warp_sum(sum) / DIM + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int at = (lane + i * 32) * V;
        if (at >= HALF) break;
        Vector first, second;
        load_pairs(weight, at, first, second);
        scaled(h.first[i], scale, first), scaled(h.second[i], scale, second);
    }
#pragma unroll
    for (int i = 0; i < REST; i++) {
        int at = ROTATED + (lane + i * 32) * V;
        if (at < DIM) scaled(h.rest[i], scale, *(const Vector*)(weight + at));
    }
}

__device__ inline float largest(Vector p) {
    float y = 0;
#pragma unroll
    for (int j = 0; j < V; j++) y = fmaxf(y, fabsf(to_float(p.x[j])));
    return y;
}

__device__ inline void times(Vector& p, float by) {
#pragma unroll
    for (int j = 0; j < V; j++) p.x[j] = from_float<T>(to_float(p.x[j]) * by);
}

// The head's codes, and its scale by one lane. A power of two leaves T's numbers what they are, but for those that have
// no code.
__device__ inline void quantise(e4m3* to, unsigned char* scale, Head& h, int lane) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if ((lane + i * 32) * V < HALF) most = fmaxf(most, fmaxf(largest(h.first[i]), largest(h.second[i])));
#pragma unroll
    for (int i = 0; i < REST; i++)
        if (ROTATED + (lane + i * 32) * V < DIM) most = fmaxf(most, largest(h.rest[i]));
    const int exponent = scale_exponent(warp_max(most));
    const float by = inverse_scale(exponent);
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if ((lane + i * 32) * V < HALF) times(h.first[i], by), times(h.second[i], by);
#pragma unroll
    for (int i = 0; i < REST; i++)
        if (ROTATED + (lane + i * 32) * V < DIM) times(h.rest[i], by);
    store(to, h, lane);
    if (lane == 0) *scale = exponent;
}

// A lane's part of its token's cos and sin [ROTATED]: both halves are alike, the first half of sin is negated.
struct Angles {
    float cos[PAIRS][V], sin[PAIRS][V];
};

__device__ inline Angles angles(const float* cos, const float* sin, int lane) {
    Angles y;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int at = (lane + i * 32) * V;
        if (at >= HALF) break;
#pragma unroll
        for (int j = 0; j < V; j++) y.cos[i][j] = cos[at + j], y.sin[i][j] = sin[HALF + at + j];
    }
    return y;
}

__device__ inline void rotate(Head& h, const Angles& by, int lane) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        if ((lane + i * 32) * V >= HALF) break;
#pragma unroll
        for (int j = 0; j < V; j++) {
            float a = to_float(h.first[i].x[j]), b = to_float(h.second[i].x[j]);
            h.first[i].x[j] = from_float<T>(a * by.cos[i][j] - b * by.sin[i][j]);
            h.second[i].x[j] = from_float<T>(b * by.cos[i][j] + a * by.sin[i][j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
rope_and_store_kv(T* q, const T* k, const T* v, int q_row, int k_row, int v_row, const float* cos, const float* sin,
           const T* q_weight, const T* k_weight, float eps, C* keys, C* values, unsigned char* scales, const long long* slots, int tokens) {
    constexpr int HEADS = Q_HEADS + 2 * KV_HEADS, UNITS = (HEADS + PER - 1) / PER;
    launch_dependents();
    grid_wait();
    int unit = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = unit / UNITS;
    if (t >= tokens) return;
    Angles by = angles(cos + (long long)t * ROTATED, sin + (long long)t * ROTATED, lane);
    long long slot = slots[t];  // negative: a row that only fills a captured batch up
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int head = unit % UNITS * PER + i;
        if (head < Q_HEADS) {
            T* at = q + (long long)t * q_row + head * DIM;
            Head h = load(at, lane);
            if (NORM) normalise(h, q_weight, eps, lane);
            rotate(h, by, lane);
            store(at, h, lane);
        } else if (head < HEADS && slot >= 0) {
            bool key = head < Q_HEADS + KV_HEADS;
            head -= key ? Q_HEADS : Q_HEADS + KV_HEADS;
            Head h = load(key ? k + (long long)t * k_row + head * DIM : v + (long long)t * v_row + head * DIM, lane);
            if (key) {
                if (NORM) normalise(h, k_weight, eps, lane);
                rotate(h, by, lane);
            }
            const long long to = (slot * KV_HEADS + head) * DIM;
            if (FP8) {
                const long long of_block = (slot / SIZE * KV_HEADS + head) * 2 + !key;
                quantise((e4m3*)(key ? keys : values) + to, scales + of_block * SIZE + slot % SIZE, h, lane);
            } else {
                store((key ? keys : values) + to, h, lane);
            }
        }
    }
}
