// The gated delta net's convolution and rule of sequences that decode, and the norm of what it reads;
// threads share the channels, and the heads, of all sequences.
//
// A head's state is read twice, once for what it holds under the token's key and once to be changed and read, LANES
// columns after the other: the second time it comes from the core's own cache.

#include "op.h"
#include "simd.h"
#include "recurrent.h"

struct DeltaStep {
    const void* qkv;                // [tokens, pitch]: query_len of each sequence
    const void *b, *a;              // [tokens, b_pitch], [tokens, a_pitch]
    const float *a_log, *dt_bias;   // [value heads], [value heads * decays]
    float* state;                   // [rows, entries, value heads, key, value]: rings, as gated_delta.py explains
    const int64_t* rows;            // [sequences]; -1: no sequence, it writes nothing and reads zeros
    const int32_t* lengths;         // [sequences]: query_len: the sequence begins, whatever its row holds
    void* out;                      // [tokens, value heads, value]
    int64_t sequences, query_len, pitch, b_pitch, a_pitch, key_heads, value_heads, key, value;
    int64_t decays;  // of a head: 1, or key
    int64_t entries;
    double eps, floor;
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

// A token's effect on a state, for each element of its key.
struct Keys {
    float q[MOST], k[MOST];
    float left[MOST];     // the factor that is left of the state: exp(g) of Gates.decays; a head's one decay is first
    float decayed[MOST];  // left * k, where channels have decays of their own
};

// The `n` columns of a state that become `to`; returns what the query reads.
template <bool CHANNELS> INLINE Vec strip(const float* s, float* to, const Keys& keys, Vec v, const DeltaStep& a, float beta, int64_t n) {
    bool full = n == LANES;
    float decay = keys.left[0];
    Vec held = {}, read = {};
    for (int64_t i = 0; i < a.key; i++) {
        float k = CHANNELS ? keys.decayed[i] : keys.k[i];
        held += (full ? load(s + i * a.value) : load(s + i * a.value, n)) * k;
    }
    Vec change = (v - (CHANNELS ? held : held * decay)) * beta;
    for (int64_t i = 0; i < a.key; i++) {
        const float* from = s + i * a.value;
        float* at = to + i * a.value;
        Vec x = (full ? load(from) : load(from, n)) * (CHANNELS ? keys.left[i] : decay) + change * keys.k[i];
        if (full)
            store(at, x);
        else
            store(at, x, n);
        read += x * keys.q[i];
    }
    return read;
}

// A token makes of the state before it, `before`, its own, `state`.
template <typename T> INLINE void delta_token(const DeltaStep& a, int64_t token, int64_t head, const float* before,
                                              float* state) {
    Keys made;
    int64_t keys = a.key_heads * a.key;
    const T* x = (const T*)a.qkv + token * a.pitch;
    const T* from = x + head / (a.value_heads / a.key_heads) * a.key;
    unit(from, made.q, a.key, a.eps, 1 / __builtin_sqrtf((float)a.key));
    unit(from + keys, made.k, a.key, a.eps, 1);
    const T* steps = (const T*)a.a + token * a.a_pitch + head * a.decays;
    float rate = -exp(a.a_log[head]);
    for (int64_t i = 0; i < a.decays; i++) {
        float x = widen(steps[i]) + a.dt_bias[head * a.decays + i];
        made.left[i] = exp(a.floor ? (float)a.floor / (1 + exp(rate * x)) : rate * softplus(x));
        made.decayed[i] = made.left[i] * made.k[i];
    }
    float beta = 1 / (1 + exp(-widen(((const T*)a.b)[token * a.b_pitch + head])));
    for (int64_t c = 0; c < a.value; c += LANES) {
        int64_t n = a.value - c < LANES ? a.value - c : LANES;
        const T* value = x + 2 * keys + head * a.value + c;
        T* out = (T*)a.out + (token * a.value_heads + head) * a.value + c;
        Vec v = n == LANES ? load(value) : load(value, n);
        Vec y = a.decays > 1 ? strip<true>(before + c, state + c, made, v, a, beta, n)
                             : strip<false>(before + c, state + c, made, v, a, beta, n);
        if (n == LANES)
            store(out, y);
        else
            store(out, y, n);
    }
}

template <typename T> void delta_step(const DeltaStep& a, int part, int parts) {
    walk_states<T>(a, a.value_heads, a.key * a.value, a.value, part, parts,
                   [&](int64_t token, int64_t head, const float* before, float* state) {
                       delta_token<T>(a, token, head, before, state);
                   });
}

struct GatedNorm {
    const void *x, *z, *weight;
    void* y;  // [rows, size], as x and z: the RMS norm of x times SiLU(z), or sigmoid(z)
    int64_t rows, size, silu;
    double eps;
};

template <typename T> void gated_norm(const GatedNorm& a, int part, int parts) {
    Share rows(a.rows, part, parts);
    const T* weight = (const T*)a.weight;
    for (int64_t t = rows.first; t < rows.last; t++) {
        const T *x = (const T*)a.x + t * a.size, *z = (const T*)a.z + t * a.size;
        T* y = (T*)a.y + t * a.size;
        float total = 0;
        strips(0, a.size, STRIP { total += sum(load(x + i, n) * load(x + i, n)); });
        float scale = 1 / __builtin_sqrtf(total / a.size + (float)a.eps);
        strips(0, a.size, STRIP {
            Vec gate = load(z + i, n);
            Vec by = load(weight + i, n) / (1 + exp(-gate));
            store(y + i, load(x + i, n) * scale * (a.silu ? by * gate : by), n);
        });
    }
}

struct ConvStep {
    const void *x, *weight;  // [tokens, x_pitch], [channels, weight_pitch]
    const void* bias;        // [channels]; null: none
    float* state;            // [rows, kept, channels]: rings of the inputs of the tokens before
    const int64_t* rows;  // as DeltaStep's
    const int32_t* lengths;
    void* out;  // [tokens, channels]
    int64_t sequences, query_len, x_pitch, weight_pitch, channels, taps, kept, silu;
};

// Channels c..c + n - 1 of a sequence. oldest: the ring's entry of the first of the inputs that its first token reads.
template <typename T> INLINE void conv_strip(const ConvStep& a, int64_t sequence, int64_t oldest, int64_t c,
                                             int64_t n) {
    const T* x = (const T*)a.x + sequence * a.query_len * a.x_pitch + c;
    const T* weight = (const T*)a.weight + c * a.weight_pitch;
    T* out = (T*)a.out + sequence * a.query_len * a.channels + c;
    if (a.rows[sequence] < 0) {
        for (int64_t j = 0; j < a.query_len; j++) store(out + j * a.channels, Vec{}, n);
        return;
    }
    float* state = a.state + a.rows[sequence] * a.kept * a.channels + c;
    int64_t first = a.lengths[sequence] - a.query_len;  // the position of the first token
    int64_t before = a.taps - 1;
    auto entry = [&](int64_t token) {  // of this step; a negative one is before it
        int64_t at = oldest + before + token;
        return state + (at < a.kept ? at : at - a.kept) * a.channels;
    };
    for (int64_t j = 0; j < a.query_len; j++) {
        Vec total = {};
        if (a.bias) total = load((const T*)a.bias + c, n);
        for (int64_t k = 0; k < a.taps; k++) {
            int64_t token = j - before + k;
            Vec tap = {}, input = {};
            for (int64_t i = 0; i < n; i++) tap[i] = widen(weight[i * a.weight_pitch + k]);
            if (token >= 0)
                input = load(x + token * a.x_pitch, n);
            else if (first + token >= 0)
                input = load(entry(token), n);
            total += input * tap;
        }
        // The oldest input, which this one replaces, is read by no later token of the step.
        if (a.kept) store(entry(j), load(x + j * a.x_pitch, n), n);
        store(out + j * a.channels, a.silu ? total / (1 + exp(-total)) : total, n);
    }
}

template <typename T> void conv_step(const ConvStep& a, int part, int parts) {
    int64_t strips = (a.channels + LANES - 1) / LANES;
    Share share(a.sequences * strips, part, parts);
    for (int64_t i = share.first; i < share.last;) {
        int64_t sequence = i / strips, begin = sequence * strips, end = begin + strips;
        int64_t oldest = a.kept ? (a.lengths[sequence] - a.query_len - a.taps + 1 + a.kept) % a.kept : 0;
        for (; i < end && i < share.last; i++) {
            int64_t c = (i - begin) * LANES, n = a.channels - c;
            conv_strip<T>(a, sequence, oldest, c, n < LANES ? n : LANES);
        }
    }
}

TYPED_OP(conv_step, conv_step, ConvStep)
TYPED_OP(delta_step, delta_step, DeltaStep)
TYPED_OP(gated_norm, gated_norm, GatedNorm)
