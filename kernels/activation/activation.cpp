// Gated activations: y [T, I] = f(gate) * up of x [T, 2 I], gate beside up. Threads share the columns of every row.

#include "op.h"
#include "simd.h"

struct Gated {
    const void* x;
    void* y;
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
    static INLINE Vec of(Vec x) {
        Vec y = x < 0 ? (Vec){} : x;  // a NaN stays one
        return y * y;
    }
};

template <typename F, typename T> void gated(const Gated& a, int part, int parts) {
    Share share((a.width + LANES - 1) / LANES, part, parts);
    int64_t first = share.first * LANES, last = share.last * LANES < a.width ? share.last * LANES : a.width;
    for (int64_t t = 0; t < a.rows; t++) {
        const T *gate = (const T*)a.x + t * 2 * a.width, *up = gate + a.width;
        T* y = (T*)a.y + t * a.width;
        int64_t i = first;
        for (; i + LANES <= last; i += LANES) store(y + i, F::of(load(gate + i)) * load(up + i));
        if (i < last) store(y + i, F::of(load(gate + i, last - i)) * load(up + i, last - i), last - i);
    }
}

OP(silu_f32, (gated<Silu, float>), Gated)
OP(silu_bf16, (gated<Silu, bf16>), Gated)
OP(gelu_f32, (gated<Gelu, float>), Gated)
OP(gelu_bf16, (gated<Gelu, bf16>), Gated)
OP(gelu_tanh_f32, (gated<GeluTanh, float>), Gated)
OP(gelu_tanh_bf16, (gated<GeluTanh, bf16>), Gated)
OP(relu2_f32, (gated<Relu2, float>), Gated)
OP(relu2_bf16, (gated<Relu2, bf16>), Gated)
