// Activations, gated: y [T, I] = f(gate) * up of x [T, 2 I], gate beside up; and plain: y = f(x). Threads share the
// columns of every row, or the elements.

#include "op.h"
#include "simd.h"

struct Gated {
    const void* x;
    void* y;
    int64_t rows, width;
};

struct Plain {
    const void* x;
    void* y;  // may be x
    int64_t count;
};

struct SigmoidGate {
    const void *x, *gate;
    void* y;  // x * sigmoid(gate)
    int64_t count;
};

struct ScaleBySigmoid {
    void* x;           // [rows, width], times sigmoid(gate)
    const void* gate;  // [rows]
    int64_t rows, width;
};

struct Silu {
    static INLINE Vec of(Vec x) { return x / (1 + exp(-x)); }
};

struct GeluTanh {
    static INLINE Vec of(Vec x) {
        Vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
        return 0.5f * x * (1 + tanh(inner));
    }
};

struct Gelu {
    // erf to 1.5e-7 by Abramowitz and Stegun's 7.1.26, of |x|: it is odd.
    static INLINE Vec of(Vec x) {
        Vec z = x * 0.70710678f;
        Vec size = z < 0 ? -z : z;
        Vec t = 1 / (1 + 0.3275911f * size);
        Vec p = t * 1.061405429f - 1.453152027f;
        p = t * p + 1.421413741f;
        p = t * p - 0.284496736f;
        p = t * p + 0.254829592f;
        Vec erf = 1 - t * p * exp(-size * size);
        return 0.5f * x * (1 + (z < 0 ? -erf : erf));
    }
};

struct Relu2 {
    static INLINE Vec of(Vec x) { return x < 0 ? fill(0) : x * x; }  // NaNs stay NaNs
};

// Gated: y of gate and up.
template <typename F> struct Times {
    static INLINE Vec of(Vec gate, Vec up) { return F::of(gate) * up; }
};

struct ClampedSwiglu {  // as in activation.py; NaNs stay NaNs
    static INLINE Vec of(Vec gate, Vec up) {
        gate = gate > 7 ? fill(7) : gate;
        up = up > 7 ? fill(7) : up;
        up = up < -7 ? fill(-7) : up;
        return gate / (1 + exp(-1.702f * gate)) * (up + 1);
    }
};

template <typename F, typename T> void plain(const Plain& a, int part, int parts) {
    Share share(a.count, part, parts);
    const T* x = (const T*)a.x;
    T* y = (T*)a.y;
    int64_t i = share.first;
    for (; i + LANES <= share.last; i += LANES) store(y + i, F::of(load(x + i)));
    if (i < share.last) store(y + i, F::of(load(x + i, share.last - i)), share.last - i);
}

template <typename F, typename T> void gated(const Gated& a, int part, int parts) {
    Share share((a.width + LANES - 1) / LANES, part, parts);
    int64_t first = share.first * LANES, last = share.last * LANES < a.width ? share.last * LANES : a.width;
    for (int64_t t = 0; t < a.rows; t++) {
        const T *gate = (const T*)a.x + t * 2 * a.width, *up = gate + a.width;
        T* y = (T*)a.y + t * a.width;
        int64_t i = first;
        for (; i + LANES <= last; i += LANES) store(y + i, F::of(load(gate + i), load(up + i)));
        if (i < last) store(y + i, F::of(load(gate + i, last - i), load(up + i, last - i)), last - i);
    }
}

template <typename T> void sigmoid_gate(const SigmoidGate& a, int part, int parts) {
    Share share(a.count, part, parts);
    const T *x = (const T*)a.x, *gate = (const T*)a.gate;
    T* y = (T*)a.y;
    int64_t i = share.first;
    for (; i + LANES <= share.last; i += LANES) store(y + i, load(x + i) / (1 + exp(-load(gate + i))));
    int64_t n = share.last - i;
    if (n > 0) store(y + i, load(x + i, n) / (1 + exp(-load(gate + i, n))), n);
}

template <typename T> void scale_by_sigmoid(const ScaleBySigmoid& a, int part, int parts) {
    Share share(a.width, part, parts);
    for (int64_t t = 0; t < a.rows; t++) {
        T* x = (T*)a.x + t * a.width;
        Vec factor = 1 / (1 + exp(-fill(widen(((const T*)a.gate)[t]))));
        int64_t i = share.first;
        for (; i + LANES <= share.last; i += LANES) store(x + i, load(x + i) * factor);
        if (i < share.last) store(x + i, load(x + i, share.last - i) * factor, share.last - i);
    }
}

#define GATED(name, F)                               \
    OP(gated_##name##_f32, (gated<F, float>), Gated) \
    OP(gated_##name##_bf16, (gated<F, bf16>), Gated)

#define ACTIVATION(name, F)                  \
    GATED(name, Times<F>)                    \
    OP(name##_f32, (plain<F, float>), Plain) \
    OP(name##_bf16, (plain<F, bf16>), Plain)

ACTIVATION(silu, Silu)
ACTIVATION(gelu, Gelu)
ACTIVATION(gelu_tanh, GeluTanh)
ACTIVATION(relu2, Relu2)
GATED(clamped_swiglu, ClampedSwiglu)
OP(scale_by_sigmoid_f32, scale_by_sigmoid<float>, ScaleBySigmoid)
OP(scale_by_sigmoid_bf16, scale_by_sigmoid<bf16>, ScaleBySigmoid)
OP(sigmoid_gate_f32, sigmoid_gate<float>, SigmoidGate)
OP(sigmoid_gate_bf16, sigmoid_gate<bf16>, SigmoidGate)
