// The largest element of each row [S, V] and where the first such stands: each thread looks through its share of the
// columns, then one of them through what all have found. NaNs are passed over; a row of nothing else gives -inf and 0.

#include "op.h"
#include "simd.h"

struct Argmax {
    const void* x;
    float *values, *part_values;  // [S]; [threads, S]
    int64_t *ids, *part_ids;
    int64_t rows, width, pitch;
};

template <typename T> void find(const Argmax& a, int part, int parts) {
    Share share(a.width, part, parts);
    for (int64_t s = 0; s < a.rows; s++) {
        const T* x = (const T*)a.x + s * a.pitch;
        Vec best = fill(-__builtin_inff());
        Ints at = {}, place = {}, lane = {};
        for (int j = 0; j < LANES; j++) lane[j] = j;
        int64_t i = share.first;
        place = lane + (int32_t)i;
        at = place;
        for (; i + LANES <= share.last; i += LANES, place += LANES) {
            Vec v = load(x + i);
            at = v > best ? place : at;
            best = v > best ? v : best;
        }
        float top = -__builtin_inff();
        int64_t id = share.first;
        for (int j = 0; j < LANES; j++)
            if (best[j] > top || (best[j] == top && best[j] > -__builtin_inff() && at[j] < id)) {
                top = best[j];
                id = at[j];
            }
        for (; i < share.last; i++)
            if (widen(x[i]) > top) {
                top = widen(x[i]);
                id = i;
            }
        a.part_values[part * a.rows + s] = top;
        a.part_ids[part * a.rows + s] = id;
    }
}

static void choose(const Argmax& a, int part, int parts) {
    if (part) return;
    for (int64_t s = 0; s < a.rows; s++) {
        int64_t best = s;
        for (int p = 1; p < parts; p++)
            if (a.part_values[p * a.rows + s] > a.part_values[best]) best = p * a.rows + s;
        a.values[s] = a.part_values[best];
        a.ids[s] = a.part_ids[best];
    }
}

struct Candidates {
    const float* values;  // [S]
    const int64_t* ids;   // [S]
    float* y;             // [2, S]: values, and ids + offset
    int64_t rows, offset;
};

static void candidates(const Candidates& a, int part, int) {
    if (part) return;
    for (int64_t s = 0; s < a.rows; s++) {
        a.y[s] = a.values[s];
        a.y[a.rows + s] = (float)(a.ids[s] + a.offset);
    }
}

struct Elect {
    const float* x;  // [parts, 2, S]: candidates
    int64_t* ids;    // [S]: of the largest value, the first such
    int64_t rows, parts;
};

static void elect(const Elect& a, int part, int) {
    if (part) return;
    for (int64_t s = 0; s < a.rows; s++) {
        const float *best = a.x + s, *x = best;
        for (int64_t p = 1; p < a.parts; p++) {
            x += 2 * a.rows;
            if (*x > *best) best = x;
        }
        a.ids[s] = (int64_t)best[a.rows];
    }
}

TYPED_OP(find, find, Argmax)
OP(choose_f32, choose, Argmax)
OP(candidates_f32, candidates, Candidates)
OP(elect_f32, elect, Elect)
