// Layer norms of rows, alone and after an addition; threads share the rows. Computed in f32, rounded to T once.

#include "op.h"
#include "simd.h"

struct LayerNorm {
    const void *x, *weight, *bias;  // weight and bias: null where there is none
    void* y;                        // [rows, width, size], contiguous
    int64_t rows, width, size;
    int64_t outer, inner;  // row (i, j) of x begins at i * outer + j * inner
    int64_t step;          // its weight and bias at j * step
    double eps;
};

struct AddLayerNorm {
    void *x, *residual;                 // residual += x, then x = its norm
    const void *weight, *bias, *other;  // other: is added to x before, and that rounded; null: nothing is
    int64_t rows, size;
    double eps;
};

// The next `left` elements, or as many as a vector has; zeros behind them.
template <typename T> INLINE Vec load_part(const T* x, int64_t left) { return left < LANES ? load(x, left) : load(x); }
template <typename T> INLINE void store_part(T* y, Vec x, int64_t left) {
    if (left < LANES)
        store(y, x, left);
    else
        store(y, x);
}

template <typename T> INLINE void norm_row(const T* x, const T* weight, const T* bias, T* y, int64_t size, double eps) {
    Vec total = {}, squares = {};
    for (int64_t i = 0; i < size; i += LANES) total += load_part(x + i, size - i);
    const float mean = sum(total) / size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vec v = load(x + i) - mean;
        squares = v * v + squares;
    }
    float square = sum(squares);
    for (; i < size; i++) square += (widen(x[i]) - mean) * (widen(x[i]) - mean);
    const float scale = 1 / __builtin_sqrtf(square / size + (float)eps);
    for (i = 0; i < size; i += LANES) {
        Vec v = (load_part(x + i, size - i) - mean) * scale;
        if (weight) v *= load_part(weight + i, size - i);
        if (bias) v += load_part(bias + i, size - i);
        store_part(y + i, v, size - i);
    }
}

template <typename T> INLINE void add_row(const T* x, T* y, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES)
        store_part(y + i, load_part(y + i, size - i) + load_part(x + i, size - i), size - i);
}

template <typename T> void layer_norm(const LayerNorm& a, int part, int parts) {
    Share rows(a.rows * a.width, part, parts);
    for (int64_t t = rows.first; t < rows.last; t++) {
        int64_t i = t / a.width, j = t % a.width, at = j * a.step;
        const T *weight = a.weight ? (const T*)a.weight + at : nullptr, *bias = a.bias ? (const T*)a.bias + at : nullptr;
        norm_row((const T*)a.x + i * a.outer + j * a.inner, weight, bias, (T*)a.y + t * a.size, a.size, a.eps);
    }
}

template <typename T> void add_layer_norm(const AddLayerNorm& a, int part, int parts) {
    Share rows(a.rows, part, parts);
    for (int64_t t = rows.first; t < rows.last; t++) {
        T *x = (T*)a.x + t * a.size, *residual = (T*)a.residual + t * a.size;
        if (a.other) add_row((const T*)a.other + t * a.size, x, a.size);
        add_row(x, residual, a.size);
        norm_row(residual, (const T*)a.weight, (const T*)a.bias, x, a.size, a.eps);
    }
}

OP(layer_norm_f32, layer_norm<float>, LayerNorm)
OP(layer_norm_bf16, layer_norm<bf16>, LayerNorm)
OP(add_layer_norm_f32, add_layer_norm<float>, AddLayerNorm)
OP(add_layer_norm_bf16, add_layer_norm<bf16>, AddLayerNorm)
