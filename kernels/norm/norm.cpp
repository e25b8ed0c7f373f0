// RMS norms of rows [T, H], alone and after an addition; threads share the rows. Computed in f32, rounded to T once.

#include "op.h"
#include "simd.h"

struct RmsNorm {
    const void *x, *weight;
    void* y;  // [rows, size]; may be x
    int64_t rows, size, pitch;  // pitch: elements between rows of x
    double eps;
};

struct AddRmsNorm {
    void *x, *residual;  // residual += x, then x = its norm
    const void *weight, *other;  // other: is added to x before, and that rounded; null: nothing is
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

template <typename T> INLINE float sum_of_squares(const T* x, int64_t size) {
    Vec total = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vec v = load(x + i);
        total = v * v + total;
    }
    if (i < size) {
        Vec v = load(x + i, size - i);
        total = v * v + total;
    }
    return sum(total);
}

template <typename T> INLINE void norm_row(const T* x, const T* weight, T* y, int64_t size, double eps) {
    float scale = 1 / __builtin_sqrtf(sum_of_squares(x, size) / size + (float)eps);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
    if (i < size) store(y + i, load(x + i, size - i) * scale * load(weight + i, size - i), size - i);
}

template <typename T> INLINE void add_row(const T* x, T* y, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, load(y + i) + load(x + i));
    if (i < size) store(y + i, load(y + i, size - i) + load(x + i, size - i), size - i);
}

template <typename T> void rms_norm(const RmsNorm& a, int part, int parts) {
    Share rows(a.rows, part, parts);
    for (int64_t t = rows.first; t < rows.last; t++)
        norm_row((const T*)a.x + t * a.pitch, (const T*)a.weight, (T*)a.y + t * a.size, a.size, a.eps);
}

template <typename T> void add_rms_norm(const AddRmsNorm& a, int part, int parts) {
    Share rows(a.rows, part, parts);
    for (int64_t t = rows.first; t < rows.last; t++) {
        T *x = (T*)a.x + t * a.size, *residual = (T*)a.residual + t * a.size;
        if (a.other) add_row((const T*)a.other + t * a.size, x, a.size);
        add_row(x, residual, a.size);
        norm_row(residual, (const T*)a.weight, x, a.size, a.eps);
    }
}

template <typename T> void add(const Add& a, int part, int parts) {
    Share share(a.count, part, parts);
    add_row((const T*)a.x + share.first, (T*)a.y + share.first, share.last - share.first);
}

template <typename T> void scale(const Scale& a, int part, int parts) {
    Share share(a.width, part, parts);
    for (int64_t t = 0; t < a.rows; t++) {
        T* x = (T*)a.x + t * a.pitch;
        float factor = a.factors ? a.factors[t] : (float)a.factor;
        int64_t i = share.first;
        for (; i + LANES <= share.last; i += LANES) store(x + i, load(x + i) * factor);
        if (i < share.last) store(x + i, load(x + i, share.last - i) * factor, share.last - i);
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

OP(rms_norm_f32, rms_norm<float>, RmsNorm)
OP(rms_norm_bf16, rms_norm<bf16>, RmsNorm)
OP(add_rms_norm_f32, add_rms_norm<float>, AddRmsNorm)
OP(add_rms_norm_bf16, add_rms_norm<bf16>, AddRmsNorm)
OP(add_f32, add<float>, Add)
OP(add_bf16, add<bf16>, Add)
OP(scale_f32, scale<float>, Scale)
OP(scale_bf16, scale<bf16>, Scale)
OP(copy_rows, copy_rows, CopyRows)
OP(copy_blocks, copy_blocks, CopyBlocks)
