// Logits x [S, V] in place: times a factor, soft-capped, and -inf in the padding. Threads share the columns of every row.

#include "op.h"
#include "simd.h"

struct Finish {
    void* x;
    int64_t rows, width, present;  // columns from `present` on are padding
    double scale, softcap;         // softcap 0: none
};

template <typename T> void finish(const Finish& a, int part, int parts) {
    Share share((a.width + LANES - 1) / LANES, part, parts);
    int64_t first = share.first * LANES, last = share.last * LANES < a.present ? share.last * LANES : a.present;
    int64_t end = share.last * LANES < a.width ? share.last * LANES : a.width;
    float before = a.softcap ? (float)(a.scale / a.softcap) : (float)a.scale, after = (float)a.softcap;
    bool plain = before == 1 && !a.softcap;
    for (int64_t s = 0; s < a.rows; s++) {
        T* x = (T*)a.x + s * a.width;
        if (!plain)
            strips(first, last, STRIP {
                Vec v = load(x + i, n) * before;
                store(x + i, a.softcap ? tanh(v) * after : v, n);
            });
        for (int64_t i = last > first ? last : first; i < end; i++) x[i] = narrow<T>(-__builtin_inff());
    }
}

TYPED_OP(finish, finish, Finish)
