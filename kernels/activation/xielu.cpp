// xIELU, in place. Threads share the elements.

#include "op.h"
#include "simd.h"

struct Xielu {
    void* x;
    int64_t count;
    double positive, negative, beta;
};

// Near zero e^x - 1 - x loses precision, but is then a millionth of beta x.
INLINE Vec xielu_of(Vec x, const Xielu& a) {
    Vec left = x < 0 ? x : fill(0);
    Vec curve = x > 0 ? (float)a.positive * x * x : (float)a.negative * (exp(left) - 1 - left);
    return curve + (float)a.beta * x;
}

template <typename T> void xielu(const Xielu& a, int part, int parts) {
    Share share(a.count, part, parts);
    T* x = (T*)a.x;
    strips(share.first, share.last, STRIP { store(x + i, xielu_of(load(x + i, n), a), n); });
}

TYPED_OP(xielu, xielu, Xielu)
