// What stands around the linears of experts: pairs of a token and one of its experts are sorted by expert, get the rows
// of their tokens, and are added up by token again.

#include "op.h"
#include "simd.h"

struct Sort {
    const void* ids;            // int32 [pairs]
    void *order, *place, *ends;  // int32 [pairs], [pairs], [experts + 1]
    int64_t pairs, experts, first;
};

struct Gather {
    const void *x, *order;
    void* y;
    int64_t pairs, top, width, pitch;  // top: experts of a token; pitch: elements from row to row of x
};

struct Combine {
    const void *x, *place, *weights;  // x [pairs, width] in the order of the experts
    void* y;
    int64_t tokens, top, width;
};

// order: pairs, expert by expert, and last those whose experts are not among `experts` from `first` on; place: where
// each pair stands there, -1 of those last ones; ends: where each expert's begin.
static void sort(const Sort& a, int part, int) {
    if (part) return;
    const int32_t* ids = (const int32_t*)a.ids;
    int32_t *order = (int32_t*)a.order, *place = (int32_t*)a.place, *ends = (int32_t*)a.ends;
    auto expert = [&](int64_t p) {
        int64_t e = ids[p] - a.first;
        return e < 0 || e >= a.experts ? a.experts : e;
    };
    for (int64_t e = 0; e <= a.experts; e++) ends[e] = 0;
    for (int64_t p = 0; p < a.pairs; p++) ends[expert(p)]++;
    int32_t at = 0;
    for (int64_t e = 0; e <= a.experts; e++) {
        int32_t count = ends[e];
        ends[e] = at;
        at += count;
    }
    const int32_t held = ends[a.experts];
    for (int64_t p = 0; p < a.pairs; p++) {
        int64_t e = expert(p);
        order[ends[e]] = (int32_t)p;
        place[p] = e < a.experts ? ends[e] : -1;
        ends[e]++;
    }
    for (int64_t e = a.experts; e > 0; e--) ends[e] = ends[e - 1];  // each had become the next one's
    ends[0] = 0;
    ends[a.experts] = held;
}

template <typename T> void gather(const Gather& a, int part, int parts) {
    Share share(a.pairs, part, parts);
    for (int64_t i = share.first; i < share.last; i++) {
        const T* x = (const T*)a.x + ((const int32_t*)a.order)[i] / a.top * a.pitch;
        memcpy((T*)a.y + i * a.width, x, a.width * sizeof(T));
    }
}

// y[t] = the sum over j of weights[t, j] * x[place[t, j]], in f32.
template <typename T> void combine(const Combine& a, int part, int parts) {
    Share share((a.width + LANES - 1) / LANES, part, parts);
    const int64_t first = share.first * LANES, last = share.last * LANES < a.width ? share.last * LANES : a.width;
    for (int64_t t = 0; t < a.tokens; t++) {
        const int32_t* place = (const int32_t*)a.place + t * a.top;
        const float* weights = (const float*)a.weights + t * a.top;
        T* y = (T*)a.y + t * a.width;
        for (int64_t i = first; i < last; i += LANES) {
            const int64_t count = last - i;
            Vec sum = {};
            for (int64_t j = 0; j < a.top; j++) {
                if (place[j] < 0) continue;
                const T* x = (const T*)a.x + place[j] * a.width + i;
                sum += weights[j] * (count >= LANES ? load(x) : load(x, count));
            }
            if (count >= LANES)
                store(y + i, sum);
            else
                store(y + i, sum, count);
        }
    }
}

OP(experts_sort, sort, Sort)
OP(experts_gather_f32, gather<float>, Gather)
OP(experts_gather_bf16, gather<bf16>, Gather)
OP(experts_combine_f32, combine<float>, Combine)
OP(experts_combine_bf16, combine<bf16>, Combine)
