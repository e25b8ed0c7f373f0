// What experts make of their tokens, expert by expert, wherever the weights of each lie: a table has their addresses. A
// pair is a token and one of its k experts; pair p is of token p / k. Pairs get places in the order of their experts, so
// that each expert's rows stand side by side. Several rounds may place pairs, with other tables; what all of them have
// made is added up at the end, in the order of a token's experts.

#include "op.h"
#include "simd.h"
#include "gemm_rows.h"

// Give the pairs whose experts have an address in `table` places, from the round before's last one on.
struct Place {
    const int32_t* ids;  // [pairs]
    const int64_t* table;  // [experts] address of each expert's matrix; 0: not of this round
    int32_t* place;  // [pairs], of the pairs selected
    int32_t* pair;  // [pairs] by place
    int32_t* starts;  // [experts + 1] first place of each expert's pairs, and where the last one's end
    int64_t pairs, experts, first;  // first: the router's number of expert 0
};

void place(const Place& a, int part, int) {
    if (part) return;
    int32_t begin = a.starts[a.experts];
    for (int64_t e = 0; e <= a.experts; e++) a.starts[e] = 0;
    for (int64_t p = 0; p < a.pairs; p++) {
        int64_t e = a.ids[p] - a.first;
        if (e >= 0 && e < a.experts && a.table[e]) a.starts[e + 1]++;
    }
    a.starts[0] = begin;
    for (int64_t e = 0; e < a.experts; e++) a.starts[e + 1] += a.starts[e];
    for (int64_t p = 0; p < a.pairs; p++) {
        int64_t e = a.ids[p] - a.first;
        if (e < 0 || e >= a.experts || !a.table[e]) continue;
        int32_t at = a.starts[e]++;  // and back below
        a.place[p] = at;
        a.pair[at] = (int32_t)p;
    }
    for (int64_t e = a.experts; e > 0; e--) a.starts[e] = a.starts[e - 1];
    a.starts[0] = begin;
}

// y [place] = x [token] of the pairs in this round.
struct Gather {
    const void* x;
    void* y;
    const int32_t *pair, *starts;
    int64_t experts, k, row;  // row: bytes of one
};

void gather(const Gather& a, int part, int parts) {
    int64_t first = a.starts[0];
    Share share(a.starts[a.experts] - first, part, parts);
    for (int64_t i = first + share.first; i < first + share.last; i++)
        memcpy((char*)a.y + i * a.row, (const char*)a.x + a.pair[i] / a.k * a.row, a.row);
}

// y [place, outputs] of x [place, inputs] by each place's expert.
struct Grouped {
    const void* x;
    void* y;
    const int64_t* table;
    const void* bias;  // [experts, outputs]; null where there is none
    const int32_t* starts;
    int64_t experts, inputs, outputs;
};

template <typename T, typename Out> void grouped(const Grouped& a, int part, int parts) {
    for (int64_t e = 0; e < a.experts; e++) {
        int64_t first = a.starts[e], rows = a.starts[e + 1] - first;
        if (!rows) continue;
        const T* bias = a.bias ? (const T*)a.bias + e * a.outputs : nullptr;
        Linear one = {(const T*)a.x + first * a.inputs, (const void*)a.table[e], bias, (Out*)a.y + first * a.outputs,
                      rows, a.inputs, a.outputs, a.inputs};
        linear<T, Out>(one, part, parts);
    }
}

// y [tokens, hidden] = the sum over a token's pairs that have a place of weight * made [place].
struct Combine {
    const float* made;
    const float* weights;  // [pairs]
    const int32_t* place;  // -1: none
    float* y;
    int64_t tokens, k, hidden;
};

void combine(const Combine& a, int part, int parts) {
    Share share((a.hidden + LANES - 1) / LANES, part, parts);
    int64_t first = share.first * LANES, last = share.last * LANES < a.hidden ? share.last * LANES : a.hidden;
    for (int64_t t = 0; t < a.tokens; t++) {
        float* y = a.y + t * a.hidden;
        for (int64_t i = first; i < last; i++) y[i] = 0;
        for (int64_t p = t * a.k; p < (t + 1) * a.k; p++) {
            if (a.place[p] < 0) continue;
            const float *made = a.made + a.place[p] * a.hidden, weight = a.weights[p];
            for (int64_t i = first; i < last; i++) y[i] += weight * made[i];
        }
    }
}

OP(place_pairs, place, Place)
OP(gather_rows, gather, Gather)
OP(combine_pairs, combine, Combine)
OP(experts_up_f32, (grouped<float, float>), Grouped)
OP(experts_up_bf16, (grouped<bf16, bf16>), Grouped)
OP(experts_down_f32, (grouped<float, float>), Grouped)
OP(experts_down_bf16, (grouped<bf16, float>), Grouped)
