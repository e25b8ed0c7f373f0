// The gated delta net's convolution and rule of one token of each sequence (gated_delta.py); threads share the channels,
// and the heads, of all sequences.
//
// A head's state is read twice, once for what it holds under the token's key and once to be changed and read, a strip of LANES
// columns after the other: the second time it comes from the core's own cache.

#include "op.h"
#include "simd.h"

struct DeltaStep {
    const void* qkv;           // [sequences, pitch]
    const float *decay, *beta; // [sequences, value heads]: exp(g), and how far a state is overwritten
    float* state;              // [rows, value heads, key, value]
    const int64_t* rows;       // [sequences]
    const int32_t* lengths;    // [sequences]: 1: the sequence begins, whatever its row holds
    void* out;                 // [sequences, value heads, value]
    int64_t sequences, pitch, key_heads, value_heads, key, value;
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
        const T* x = (const T*)a.qkv + sequence * a.pitch;
        const T* from = x + head / (a.value_heads / a.key_heads) * a.key;
        unit(from, q, a.key, a.eps, 1 / __builtin_sqrtf((float)a.key));
        unit(from + keys, k, a.key, a.eps, 1);
        float* state = a.state + (a.rows[sequence] * a.value_heads + head) * a.key * a.value;
        if (a.lengths[sequence] <= 1) memset(state, 0, a.key * a.value * sizeof(float));
        for (int64_t c = 0; c < a.value; c += LANES) {
            int64_t n = a.value - c < LANES ? a.value - c : LANES;
            const T* value = x + 2 * keys + head * a.value + c;
            T* out = (T*)a.out + i * a.value + c;
            Vec v = n == LANES ? load(value) : load(value, n);
            Vec y = strip(state + c, q, k, v, a, a.decay[i], a.beta[i], n);
            if (n == LANES)
                store(out, y);
            else
                store(out, y, n);
        }
    }
}

struct ConvStep {
    const void *x, *weight;  // [sequences, x_pitch], [channels, weight_pitch]
    float* state;            // [rows, taps - 1, channels]: the inputs of the tokens before, which are replaced
    const int64_t* rows;
    const int32_t* lengths;
    void* out;  // [sequences, channels]
    int64_t sequences, x_pitch, weight_pitch, channels, taps;
};

template <typename T> INLINE void conv_strip(const ConvStep& a, int64_t sequence, int64_t c, int64_t n) {
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
