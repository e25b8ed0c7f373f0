// Mamba-2's recurrence of sequences that decode, and the gated norm behind it; threads share the heads of all sequences,
// and the groups of all tokens. ssd.py defines both.

#include "op.h"
#include "simd.h"
#include "recurrent.h"

struct SsdStep {
    const void* xbc;                    // [tokens, pitch]: query_len of each sequence
    const void* dt;                     // [tokens, dt_pitch]
    const float *a_log, *dt_bias, *d;   // [heads]
    float* state;                       // [rows, entries, heads, size, head_dim]: rings, as gated_delta.py explains
    const int64_t* rows;                // [sequences]; -1: no sequence, it writes nothing and reads zeros
    const int32_t* lengths;             // [sequences]: query_len: the sequence begins, whatever its row holds
    void* out;                          // [tokens, heads, head_dim]
    int64_t sequences, query_len, pitch, dt_pitch, groups, heads, size, head_dim, entries;
};

static const int64_t MOST = 512;  // elements of a key, as SSD_STATE in ssd.py

// A token makes of the state before it, `before`, its own, `state`.
template <typename T> INLINE void ssd_token(const SsdStep& a, int64_t token, int64_t head, const float* before,
                                            float* state) {
    float b[MOST], c[MOST];
    int64_t values = a.heads * a.head_dim, group = head / (a.heads / a.groups);
    const T* row = (const T*)a.xbc + token * a.pitch;
    for (int64_t i = 0; i < a.size; i++) {
        b[i] = widen(row[values + group * a.size + i]);
        c[i] = widen(row[values + (a.groups + group) * a.size + i]);
    }
    float dt = softplus(widen(((const T*)a.dt)[token * a.dt_pitch + head]) + a.dt_bias[head]);
    float decay = exp(-exp(a.a_log[head]) * dt);
    const T* x = row + head * a.head_dim;
    T* out = (T*)a.out + (token * a.heads + head) * a.head_dim;
    strips(0, a.head_dim, STRIP {
        Vec input = load(x + i, n), v = input * dt, y = input * a.d[head];
        for (int64_t k = 0; k < a.size; k++) {
            Vec s = load(before + k * a.head_dim + i, n) * decay + v * b[k];
            store(state + k * a.head_dim + i, s, n);
            y += s * c[k];
        }
        store(out + i, y, n);
    });
}

template <typename T> void ssd_step(const SsdStep& a, int part, int parts) {
    walk_states<T>(a, a.heads, a.size * a.head_dim, a.head_dim, part, parts,
                   [&](int64_t token, int64_t head, const float* before, float* state) {
                       ssd_token<T>(a, token, head, before, state);
                   });
}

struct SsdNorm {
    const void *x, *z;   // [rows, size], [rows, z_pitch]
    const void* weight;  // [size]; null: there is no norm
    void* y;             // [rows, size]
    int64_t rows, size, z_pitch, groups, gate_first;
    double eps;
};

template <typename T> void ssd_norm(const SsdNorm& a, int part, int parts) {
    Share groups(a.rows * a.groups, part, parts);
    int64_t size = a.size / a.groups;
    for (int64_t g = groups.first; g < groups.last; g++) {
        int64_t row = g / a.groups, at = g % a.groups * size;
        const T *x = (const T*)a.x + row * a.size + at, *z = (const T*)a.z + row * a.z_pitch + at;
        const T* weight = (const T*)a.weight + (a.weight ? at : 0);
        T* y = (T*)a.y + row * a.size + at;
        float total = 0;
        if (a.weight) strips(0, size, STRIP {
            Vec gate = load(z + i, n), value = load(x + i, n);
            if (a.gate_first) value *= gate / (1 + exp(-gate));
            total += sum(value * value);
        });
        float scale = 1 / __builtin_sqrtf(total / size + (float)a.eps);
        strips(0, size, STRIP {
            Vec gate = load(z + i, n), value = load(x + i, n) * (gate / (1 + exp(-gate)));
            store(y + i, a.weight ? value * scale * load(weight + i, n) : value, n);
        });
    }
}

TYPED_OP(ssd_step, ssd_step, SsdStep)
TYPED_OP(ssd_norm, ssd_norm, SsdNorm)
