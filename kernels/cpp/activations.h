// Activation functions of vectors, as activation.py names them. Included after simd.h.

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

// Numbers of activation.py, to which a test holds them.
constexpr int LIMIT_UNITS = 1024;
constexpr float SLOPE = 1.702f;

// Gated: y of gate and up.
template <typename F> struct Times {
    static INLINE Vec of(Vec gate, Vec up, float) { return F::of(gate) * up; }
};

INLINE Vec at_most(Vec x, float limit) { return x > limit ? fill(limit) : x; }  // NaNs stay NaNs
INLINE Vec at_least(Vec x, float limit) { return x < limit ? fill(limit) : x; }

struct ClampedSwiglu {  // as in activation.py
    static INLINE Vec of(Vec gate, Vec up, float limit) {
        gate = at_most(gate, limit);
        return gate / (1 + exp(-SLOPE * gate)) * (at_least(at_most(up, limit), -limit) + 1);
    }
};

struct ClampedSilu {
    static INLINE Vec of(Vec gate, Vec up, float limit) {
        return Silu::of(at_most(gate, limit)) * at_least(at_most(up, limit), -limit);
    }
};

struct SiluClamped {
    static INLINE Vec of(Vec gate, Vec up, float limit) {
        return at_most(Silu::of(gate), limit) * at_least(at_most(up, limit), -limit);
    }
};
