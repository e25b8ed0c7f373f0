// A router for small batches (the same computation as router.py): logits, of which threads share the tokens' products
// with the experts' rows, and then the choice, of which they share the tokens. All in f32.

#include "op.h"
#include "simd.h"

struct Logits {
    const void *x, *weight;  // [tokens, pitch], [experts, hidden]
    const float* bias;       // [experts]; null: none
    float* logits;           // [tokens, experts]
    int64_t tokens, experts, hidden, pitch;
};

struct Choose {
    float* scores;            // [tokens, experts]: logits, in whose place come scores
    const float* correction;  // [experts], added for the choice alone; null: none
    int32_t* ids;             // [tokens, top]
    float* weights;           // [tokens, top]
    int64_t tokens, experts, top, sigmoid, normalise, groups, top_groups, group_top;
    double scale;
};

static const int64_t MAX_EXPERTS = 1024;  // experts, as ROUTE_EXPERTS in router.py

template <typename T> void logits(const Logits& a, int part, int parts) {
    Share share(a.experts, part, parts);
    for (int64_t e = share.first; e < share.last; e++) {
        const T* weight = (const T*)a.weight + e * a.hidden;
        for (int64_t t = 0; t < a.tokens; t++) {
            const T* x = (const T*)a.x + t * a.pitch;
            Vec total = {};
            int64_t i = 0;
            for (; i + LANES <= a.hidden; i += LANES) total += load(x + i) * load(weight + i);
            if (i < a.hidden) total += load(x + i, a.hidden - i) * load(weight + i, a.hidden - i);
            a.logits[t * a.experts + e] = sum(total) + (a.bias ? a.bias[e] : 0);
        }
    }
}

static void score(float* x, int64_t count, bool sigmoid) {
    float most = x[0], total = 0;
    for (int64_t e = 1; e < count; e++) most = x[e] > most ? x[e] : most;
    for (int64_t e = 0; e < count; e += LANES) {
        int64_t n = count - e < LANES ? count - e : LANES;
        Vec v = load(x + e, n);
        v = sigmoid ? 1 / (1 + exp(-v)) : exp(v - most);
        store(x + e, v, n);
    }
    if (sigmoid) return;
    for (int64_t e = 0; e < count; e++) total += x[e];
    for (int64_t e = 0; e < count; e++) x[e] /= total;
}

// The index of the largest that is not taken; with NaNs the first of these, whatever they are.
static int64_t argmax(const float* x, const bool* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    return best;
}

// Marks the experts of all groups but the best ones as taken.
static void choose_groups(const Choose& a, const float* ranks, bool* taken) {
    int64_t size = a.experts / a.groups;
    float worth[MAX_EXPERTS];
    bool out[MAX_EXPERTS] = {};
    for (int64_t g = 0; g < a.groups; g++) {
        worth[g] = 0;
        for (int64_t n = 0; n < a.group_top; n++) {
            int64_t e = argmax(ranks + g * size, taken + g * size, size);
            worth[g] += ranks[g * size + e];
            taken[g * size + e] = true;
        }
    }
    memset(taken, 1, a.experts);
    for (int64_t n = 0; n < a.top_groups; n++) {
        int64_t g = argmax(worth, out, a.groups);
        out[g] = true;
        memset(taken + g * size, 0, size);
    }
}

static void choose(const Choose& a, int part, int parts) {
    Share share(a.tokens, part, parts);
    float ranks[MAX_EXPERTS];
    bool taken[MAX_EXPERTS];
    for (int64_t t = share.first; t < share.last; t++) {
        float *scores = a.scores + t * a.experts, *weights = a.weights + t * a.top, total = a.sigmoid ? 1e-20f : 0;
        score(scores, a.experts, a.sigmoid);
        for (int64_t e = 0; e < a.experts; e++) ranks[e] = scores[e] + (a.correction ? a.correction[e] : 0);
        memset(taken, 0, a.experts);
        if (a.groups > 1) choose_groups(a, ranks, taken);
        for (int64_t k = 0; k < a.top; k++) {
            int64_t e = argmax(ranks, taken, a.experts);
            taken[e] = true;
            a.ids[t * a.top + k] = (int32_t)e;
            weights[k] = scores[e];
            total += scores[e];
        }
        float factor = (float)a.scale / (a.normalise ? total : 1);
        for (int64_t k = 0; k < a.top; k++) weights[k] *= factor;
    }
}

OP(logits_f32, logits<float>, Logits)
OP(logits_bf16, logits<bf16>, Logits)
OP(choose, choose, Choose)
