// The gated delta net's convolution and rule of one token of each sequence, and the norm of what it reads;
// threads share the channels, and the heads, of all sequences.
//
// A head's state is read twice, once for what it holds under the token's key and once to be changed and read, a strip of LANES
// columns after the other: the second time it comes from the core's own cache.

#include "op.h"
#include "simd.h"

struct DeltaStep {
    const void* qkv;                // [sequences, pitch]
    const void *b, *a;              // [sequences, b_pitch], [sequences, a_pitch]
    const float *a_log, *dt_bias;   // [value heads]
    float* state;                   // [rows, value heads, key, value]
    const int64_t* rows;            // [sequences]; -1: no sequence, it writes nothing and reads zeros
    const int32_t* lengths;         // [sequences]: 1: the sequence begins, whatever its row holds
    void* out;                      // [sequences, value heads, value]
    int64_t sequences, pitch, b_pitch, a_pitch, key_heads, value_heads, key, value;
    double eps;
};

static const int64_t MOST = 512;  // elements of a key, as DELTA_KEYS in gated_delta.py

template <typename T> INLINE void unit(const T* x, float* y, int64_t size, double eps, float scale) {
    float total = 0;
    for (int64_t i = 0; i < size; i++) {
        y[i] = widen(x[i]);
        total += y[i] * y[i];
    }
    scale /= __builtin_sqrtf(total + (float)eps);
    for (int64_t i = 0; i < size; i++) y[i] *= scale;
}

INLINE float exp(float x) { return exp(fill(x))[0]; }

// log(1 + t), t >= 0: 2 atanh of t / (2 + t), by its series where that is small; else of what is left of a power of two.
INLINE float log1p(float t) {
    float whole = 0;
    if (t > 0.4f) {
        float y = t + 1;
        uint32_t bits;
        memcpy(&bits, &y, 4);
        int32_t power = (int32_t)((bits + 0x004afb0d) >> 23) - 127;  // what is left is between sqrt(1/2) and sqrt(2)
        bits -= (uint32_t)power << 23;
        memcpy(&y, &bits, 4);
        whole = power * 0.69314718f, t = y - 1;
    }
    float s = t / (2 + t), z = s * s;
    return whole + 2 * s * (1 + z * (1.f / 3 + z * (1.f / 5 + z * (1.f / 7 + z * (1.f / 9)))));
}

// What is left of a state after a token: exp(g) of Gates.decays.
INLINE float decay_of(float a, float a_log, float dt_bias) {
    float x = a + dt_bias;
    return exp(-exp(a_log) * (x > 20 ? x : log1p(exp(x))));
}

// One strip of `n` columns: what it reads.
INLINE Vec strip(float* s, const float* q, const float* k, Vec v, const DeltaStep& a, float decay, float beta, int64_t n) {
    bool full = n == LANES;
    Vec held = {}, read = {};
    for (int64_t i = 0; i < a.key; i++) held += (full ? load(s + i * a.value) : load(s + i * a.value, n)) * k[i];
    Vec change = (v - held * decay) * beta;
    for (int64_t i = 0; i < a.key; i++) {
        float* at = s + i * a.value;
        Vec x = (full ? load(at) : load(at, n)) * decay + change * k[i];
        if (full)
            store(at, x);
        else
            store(at, x, n);
        read += x * q[i];
    }
    return read;
}

template <typename T> void delta_step(const DeltaStep& a, int part, int parts) {
    Share heads(a.sequences * a.value_heads, part, parts);
    float q[MOST], k[MOST];
    int64_t keys = a.key_heads * a.key;
    for (int64_t i = heads.first; i < heads.last; i++) {
        int64_t sequence = i / a.value_heads, head = i % a.value_heads;
        if (a.rows[sequence] < 0) {
            memset((T*)a.out + i * a.value, 0, a.value * sizeof(T));
            continue;
        }
        const T* x = (const T*)a.qkv + sequence * a.pitch;
        const T* from = x + head / (a.value_heads / a.key_heads) * a.key;
        unit(from, q, a.key, a.eps, 1 / __builtin_sqrtf((float)a.key));
        unit(from + keys, k, a.key, a.eps, 1);
        float* state = a.state + (a.rows[sequence] * a.value_heads + head) * a.key * a.value;
        float decay = decay_of(widen(((const T*)a.a)[sequence * a.a_pitch + head]), a.a_log[head], a.dt_bias[head]);
        float beta = 1 / (1 + exp(-widen(((const T*)a.b)[sequence * a.b_pitch + head])));
        if (a.lengths[sequence] <= 1) memset(state, 0, a.key * a.value * sizeof(float));
        for (int64_t c = 0; c < a.value; c += LANES) {
            int64_t n = a.value - c < LANES ? a.value - c : LANES;
            const T* value = x + 2 * keys + head * a.value + c;
            T* out = (T*)a.out + i * a.value + c;
            Vec v = n == LANES ? load(value) : load(value, n);
            Vec y = strip(state + c, q, k, v, a, decay, beta, n);
            if (n == LANES)
                store(out, y);
            else
                store(out, y, n);
        }
    }
}

struct GatedNorm {
    const void *x, *z, *weight;
    void* y;  // [rows, size], as x and z: the RMS norm of x times SiLU(z)
    int64_t rows, size;
    double eps;
};

template <typename T> void gated_norm(const GatedNorm& a, int part, int parts) {
    Share rows(a.rows, part, parts);
    const T* weight = (const T*)a.weight;
    for (int64_t t = rows.first; t < rows.last; t++) {
        const T *x = (const T*)a.x + t * a.size, *z = (const T*)a.z + t * a.size;
        T* y = (T*)a.y + t * a.size;
        float total = 0;
        for (int64_t i = 0; i < a.size; i += LANES) {
            int64_t n = a.size - i;
            Vec v = n < LANES ? load(x + i, n) : load(x + i);
            total += sum(v * v);
        }
        float scale = 1 / __builtin_sqrtf(total / a.size + (float)a.eps);
        for (int64_t i = 0; i < a.size; i += LANES) {
            int64_t n = a.size - i;
            if (n < LANES) {
                Vec gate = load(z + i, n);
                store(y + i, load(x + i, n) * scale * load(weight + i, n) * gate / (1 + exp(-gate)), n);
            } else {
                Vec gate = load(z + i);
                store(y + i, load(x + i) * scale * load(weight + i) * gate / (1 + exp(-gate)));
            }
        }
    }
}

struct ConvStep {
    const void *x, *weight;  // [sequences, x_pitch], [channels, weight_pitch]
    float* state;            // [rows, taps - 1, channels]: the inputs of the tokens before, which are replaced
    const int64_t* rows;  // as DeltaStep's
    const int32_t* lengths;
    void* out;  // [sequences, channels]
    int64_t sequences, x_pitch, weight_pitch, channels, taps;
};

template <typename T> INLINE void conv_strip(const ConvStep& a, int64_t sequence, int64_t c, int64_t n) {
    if (a.rows[sequence] < 0) return store((T*)a.out + sequence * a.channels + c, Vec{}, n);
    const T *x = (const T*)a.x + sequence * a.x_pitch + c, *weight = (const T*)a.weight + c * a.weight_pitch;
    float* state = a.state + a.rows[sequence] * (a.taps - 1) * a.channels + c;
    bool begins = a.lengths[sequence] <= 1;
    Vec newest = load(x, n), total = {};
    for (int64_t k = 0; k < a.taps; k++) {
        Vec tap = {}, input = newest;
        for (int64_t i = 0; i < n; i++) tap[i] = widen(weight[i * a.weight_pitch + k]);
        if (k < a.taps - 1) input = begins ? (Vec){} : load(state + k * a.channels, n);
        total += input * tap;
        if (k > 0) store(state + (k - 1) * a.channels, input, n);
    }
    store((T*)a.out + sequence * a.channels + c, total / (1 + exp(-total)), n);
}

template <typename T> void conv_step(const ConvStep& a, int part, int parts) {
    int64_t strips = (a.channels + LANES - 1) / LANES;
    Share share(a.sequences * strips, part, parts);
    for (int64_t i = share.first; i < share.last; i++) {
        int64_t c = i % strips * LANES, n = a.channels - c;
        conv_strip<T>(a, i / strips, c, n < LANES ? n : LANES);
    }
}

OP(conv_step_f32, conv_step<float>, ConvStep)
OP(conv_step_bf16, conv_step<bf16>, ConvStep)
OP(delta_step_f32, delta_step<float>, DeltaStep)
OP(delta_step_bf16, delta_step<bf16>, DeltaStep)
OP(gated_norm_f32, gated_norm<float>, GatedNorm)
OP(gated_norm_bf16, gated_norm<bf16>, GatedNorm)
