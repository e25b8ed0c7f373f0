// Activations, gated: y [T, I] = f(gate) * up of x [T, 2 I], gate before up; and plain: y = f(x). Threads share the
// columns of every row, or the elements.

#include "op.h"
#include "simd.h"
#include "activations.h"

struct Gated {
    const void* x;
    void* y;
    int64_t rows, width, limit;  // in 1 / LIMIT_UNITS
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

struct Product {
    const void *x, *other;  // [rows, x_pitch], [rows, other_pitch]
    void* y;                // [rows, width]
    int64_t rows, width, x_pitch, other_pitch;
};

struct ScaleBySigmoid {
    void* x;           // [rows, width], times sigmoid(gate)
    const void* gate;  // [rows]
    int64_t rows, width;
};

template <typename F, typename T> void plain(const Plain& a, int part, int parts) {
    Share share(a.count, part, parts);
    const T* x = (const T*)a.x;
    T* y = (T*)a.y;
    strips(share.first, share.last, STRIP { store(y + i, F::of(load(x + i, n)), n); });
}

template <typename F, typename T> void gated(const Gated& a, int part, int parts) {
    Share share((a.width + LANES - 1) / LANES, part, parts);
    const float limit = (float)a.limit / LIMIT_UNITS;
    int64_t first = share.first * LANES, last = share.last * LANES < a.width ? share.last * LANES : a.width;
    for (int64_t t = 0; t < a.rows; t++) {
        const T *gate = (const T*)a.x + t * 2 * a.width, *up = gate + a.width;
        T* y = (T*)a.y + t * a.width;
        strips(first, last, STRIP { store(y + i, F::of(load(gate + i, n), load(up + i, n), limit), n); });
    }
}

template <typename T> void sigmoid_gate(const SigmoidGate& a, int part, int parts) {
    Share share(a.count, part, parts);
    const T *x = (const T*)a.x, *gate = (const T*)a.gate;
    T* y = (T*)a.y;
    strips(share.first, share.last, STRIP { store(y + i, load(x + i, n) / (1 + exp(-load(gate + i, n))), n); });
}

template <typename T> void product(const Product& a, int part, int parts) {
    Share share(a.width, part, parts);
    for (int64_t t = 0; t < a.rows; t++) {
        const T *x = (const T*)a.x + t * a.x_pitch, *other = (const T*)a.other + t * a.other_pitch;
        T* y = (T*)a.y + t * a.width;
        strips(share.first, share.last, STRIP { store(y + i, load(x + i, n) * load(other + i, n), n); });
    }
}

template <typename T> void scale_by_sigmoid(const ScaleBySigmoid& a, int part, int parts) {
    Share share(a.width, part, parts);
    for (int64_t t = 0; t < a.rows; t++) {
        T* x = (T*)a.x + t * a.width;
        Vec factor = 1 / (1 + exp(-fill(widen(((const T*)a.gate)[t]))));
        strips(share.first, share.last, STRIP { store(x + i, load(x + i, n) * factor, n); });
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
GATED(clamped_silu, ClampedSilu)
GATED(silu_clamped, SiluClamped)
TYPED_OP(product, product, Product)
TYPED_OP(scale_by_sigmoid, scale_by_sigmoid, ScaleBySigmoid)
TYPED_OP(sigmoid_gate, sigmoid_gate, SigmoidGate)
