// RMS norms and layer norms of rows, alone and after an addition, and what else layers do to rows in place. Threads
// share the rows. Computed in f32, rounded to T once.

#include "op.h"
#include "simd.h"

struct RmsNorm {
    const void *x, *weight;
    void* y;  // [rows, size]; may be x
    int64_t rows, size, pitch;  // pitch: elements between rows of x
    double eps;
};

struct LayerNorm {
    const void *x, *weight, *bias;  // weight and bias: null where there is none
    void* y;                        // [rows, width, size], contiguous
    int64_t rows, width, size;
    int64_t outer, inner;  // row (i, j) of x begins at i * outer + j * inner
    int64_t step;          // its weight and bias at j * step
    double eps;
};

struct AddNorm {
    void *x, *residual;                 // residual += x, then x = its norm
    const void *weight, *bias, *other;  // bias: of layer norms; other: is added to x before, and that rounded; or null
    int64_t rows, size;
    double eps;
};

struct Add {
    const void* x;
    void* y;  // y += x
    int64_t count;
};

struct Scale {
    void* x;               // [rows, width], `pitch` between rows
    const float* factors;  // of each row; null: `factor` of all
    int64_t rows, width, pitch;
    double factor;
};

struct CopyRows {
    const void* x;
    void* y;
    int64_t rows, width, x_pitch, y_pitch;  // in bytes
};

struct CopyBlocks {
    const void* x;
    void* y;                                     // [blocks, rows, width], of x with these distances between
    int64_t blocks, rows, width, x_block, x_row;  // the last three in bytes
};

template <typename T> INLINE void norm_row(const T* x, const T* weight, T* y, int64_t size, double eps) {
    Vec total = {};
    strips(0, size, STRIP {
        const Vec v = load(x + i, n);
        total = v * v + total;
    });
    float scale = 1 / __builtin_sqrtf(sum(total) / size + (float)eps);
    strips(0, size, STRIP { store(y + i, load(x + i, n) * scale * load(weight + i, n), n); });
}

// The variance is of differences from the mean: that loses no precision.
template <typename T>
INLINE void layer_norm_row(const T* x, const T* weight, const T* bias, T* y, int64_t size, double eps) {
    Vec total = {}, squares = {};
    strips(0, size, STRIP { total += load(x + i, n); });
    const float mean = sum(total) / size;
    int64_t end = size / LANES * LANES;
    for (int64_t i = 0; i < end; i += LANES) squares = (load(x + i) - mean) * (load(x + i) - mean) + squares;
    float square = sum(squares);
    for (; end < size; end++) square += (widen(x[end]) - mean) * (widen(x[end]) - mean);
    const float scale = 1 / __builtin_sqrtf(square / size + (float)eps);
    strips(0, size, STRIP {
        Vec v = (load(x + i, n) - mean) * scale;
        if (weight) v *= load(weight + i, n);
        if (bias) v += load(bias + i, n);
        store(y + i, v, n);
    });
}

template <typename T> INLINE void add_row(const T* x, T* y, int64_t size) {
    strips(0, size, STRIP { store(y + i, load(y + i, n) + load(x + i, n), n); });
}

template <typename T> void rms_norm(const RmsNorm& a, int part, int parts) {
    Share rows(a.rows, part, parts);
    for (int64_t t = rows.first; t < rows.last; t++)
        norm_row((const T*)a.x + t * a.pitch, (const T*)a.weight, (T*)a.y + t * a.size, a.size, a.eps);
}

template <typename T> void layer_norm(const LayerNorm& a, int part, int parts) {
    Share rows(a.rows * a.width, part, parts);
    for (int64_t t = rows.first; t < rows.last; t++) {
        int64_t i = t / a.width, j = t % a.width, at = j * a.step;
        const T* weight = a.weight ? (const T*)a.weight + at : nullptr;
        const T* bias = a.bias ? (const T*)a.bias + at : nullptr;
        layer_norm_row((const T*)a.x + i * a.outer + j * a.inner, weight, bias, (T*)a.y + t * a.size, a.size, a.eps);
    }
}

template <typename T, bool LAYER> void add_norm(const AddNorm& a, int part, int parts) {
    Share rows(a.rows, part, parts);
    const T *weight = (const T*)a.weight, *bias = (const T*)a.bias;
    for (int64_t t = rows.first; t < rows.last; t++) {
        T *x = (T*)a.x + t * a.size, *residual = (T*)a.residual + t * a.size;
        if (a.other) add_row((const T*)a.other + t * a.size, x, a.size);
        add_row(x, residual, a.size);
        if (LAYER)
            layer_norm_row(residual, weight, bias, x, a.size, a.eps);
        else
            norm_row(residual, weight, x, a.size, a.eps);
    }
}
template <typename T> void add_rms_norm(const AddNorm& a, int part, int parts) { add_norm<T, false>(a, part, parts); }
template <typename T> void add_layer_norm(const AddNorm& a, int part, int parts) { add_norm<T, true>(a, part, parts); }

template <typename T> void add(const Add& a, int part, int parts) {
    Share share(a.count, part, parts);
    add_row((const T*)a.x + share.first, (T*)a.y + share.first, share.last - share.first);
}

template <typename T> void scale(const Scale& a, int part, int parts) {
    Share share(a.width, part, parts);
    for (int64_t t = 0; t < a.rows; t++) {
        T* x = (T*)a.x + t * a.pitch;
        float factor = a.factors ? a.factors[t] : (float)a.factor;
        strips(share.first, share.last, STRIP { store(x + i, load(x + i, n) * factor, n); });
    }
}

void copy_rows(const CopyRows& a, int part, int parts) {
    Share share(a.width, part, parts);
    for (int64_t t = 0; t < a.rows; t++)
        memcpy((char*)a.y + t * a.y_pitch + share.first, (const char*)a.x + t * a.x_pitch + share.first,
               share.last - share.first);
}

void copy_blocks(const CopyBlocks& a, int part, int parts) {
    Share share(a.blocks * a.rows, part, parts);
    for (int64_t i = share.first; i < share.last; i++)
        memcpy((char*)a.y + i * a.width, (const char*)a.x + i / a.rows * a.x_block + i % a.rows * a.x_row, a.width);
}

TYPED_OP(rms_norm, rms_norm, RmsNorm)
TYPED_OP(add_rms_norm, add_rms_norm, AddNorm)
TYPED_OP(layer_norm, layer_norm, LayerNorm)
TYPED_OP(add_layer_norm, add_layer_norm, AddNorm)
TYPED_OP(add, add, Add)
TYPED_OP(scale, scale, Scale)
OP(copy_rows, copy_rows, CopyRows)
OP(copy_blocks, copy_blocks, CopyBlocks)
