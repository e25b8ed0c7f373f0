// Rows of a table by id, and cosines and sines by position. Threads share the columns, or the tokens.

#include "op.h"
#include "simd.h"

struct Embed {
    const int64_t* ids;
    const void* weight;
    void* y;
    int64_t count, width, start, rows;  // y[t] = weight[ids[t] - start] * scale, zeros where the table has no such row
    double scale;
};

// W: the table's numbers, where y has others.
template <typename T, typename W = T> void embed(const Embed& a, int part, int parts) {
    Share share(a.width, part, parts);
    int64_t size = share.last - share.first;
    for (int64_t t = 0; t < a.count; t++) {
        int64_t row = a.ids[t] - a.start;
        const W* x = (const W*)a.weight + row * a.width + share.first;
        T* y = (T*)a.y + t * a.width + share.first;
        if (row < 0 || row >= a.rows)
            memset(y, 0, size * sizeof(T));
        else if (a.scale == 1 && sizeof(T) == sizeof(W))
            memcpy(y, x, size * sizeof(T));
        else
            strips(0, size, STRIP { store(y + i, load(x + i, n) * (float)a.scale, n); });
    }
}

struct CosSin {
    const int64_t* positions;
    const float* table;  // [positions, 2, half]
    float *cos, *sin;    // [count, 2 half]: both halves alike, and the first one negated
    int64_t count, half;
};

static void cos_sin(const CosSin& a, int part, int parts) {
    Share share(a.count, part, parts);
    for (int64_t t = share.first; t < share.last; t++) {
        const float *cos = a.table + a.positions[t] * 2 * a.half, *sin = cos + a.half;
        float *to_cos = a.cos + t * 2 * a.half, *to_sin = a.sin + t * 2 * a.half;
        for (int64_t i = 0; i < a.half; i++) {
            to_cos[i] = to_cos[a.half + i] = cos[i];
            to_sin[i] = -sin[i];
            to_sin[a.half + i] = sin[i];
        }
    }
}

TYPED_OP(embed, embed, Embed)
OP(embed_f32_of_bf16, (embed<float, bf16>), Embed)
OP(embed_f32_of_f16, (embed<float, f16>), Embed)
OP(cos_sin_f32, cos_sin, CosSin)
