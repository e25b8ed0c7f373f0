// y [M, O] = x [M, I] times the transpose of a weight [O, I] in e4m3, plus a bias [O], for a few rows; sums are f32.
//
// The weight lies in blocks of 16 outputs, input after input: a thread reads one stream of memory. Codes may be read as
// numbers that are too small (load_e4m3), which the scales make up for.

#include "op.h"
#include "simd.h"
#include "store_sums.h"
#include "experts.h"

struct Linear {
    const void *x, *codes, *scales, *bias;  // x: f32; bias: null where there is none
    void* y;
    int64_t rows, inputs, outputs, pitch, unit;  // pitch: elements from row to row of x; unit: inputs of a scale
};

// The weights of several experts, one after the other, each with rows of x of its own.
struct Experts {
    const void *x, *codes, *scales, *bias, *offsets, *at;  // bias [experts, outputs]; offsets: as each_block has it; at: weight_of
    void *taken, *y;  // taken: as each_block has it
    int64_t experts, inputs, outputs, pitch, unit;
};

struct Widen {
    const void *x, *offsets;  // offsets: of experts, whose first and last say which rows; null: all
    void* y;               // f32
    int64_t rows, inputs, pitch, experts;
};

struct Dequantize {
    const void *codes, *scales;
    void* y;
    int64_t inputs, outputs, unit;
};

struct Encode {
    const void* weight;
    void *codes, *scales;  // scales: f32
    int64_t groups, unit;
};

constexpr int BLOCK = 16;            // outputs
constexpr int STEP = 4;              // inputs that are converted together; a unit has a multiple of it
constexpr int AHEAD = 4096;          // bytes from what is read to what is asked for
constexpr int WIDE = BLOCK / LANES;  // vectors of a block's outputs
constexpr int ROWS = LANES == 16 ? 8 : LANES == 8 ? 4 : 2;  // rows at once: their sums are in registers
// y[m : m + R, o : o + BLOCK], as far as there are outputs.
template <int R, typename T> INLINE void outputs(const Linear& a, int64_t m, int64_t o, const uint8_t* w, const float* by) {
    constexpr int PARTS = R == 1 ? 4 : R < 4 ? 2 : 1;  // sums of each row, so that no addition waits for the last one
    const float* x = (const float*)a.x + m * a.pitch;
    Vec total[R][WIDE] = {};
    for (int64_t i = 0; i < a.inputs; i += a.unit, by += BLOCK) {
        Vec part[R][WIDE][PARTS] = {};
        for (int64_t q = i; q < i + a.unit; q += STEP, w += STEP * BLOCK) {
            __builtin_prefetch(w + AHEAD, 0, 2);
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) {
                Vec codes[STEP];
                load_e4m3<STEP, BLOCK>(w + v * LANES, codes);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int j = 0; j < STEP; j++) part[r][v][j % PARTS] += codes[j] * x[r * a.pitch + q + j];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) {
                Vec sum = part[r][v][0];
                for (int p = 1; p < PARTS; p++) sum += part[r][v][p];
                total[r][v] += sum * (load(by + v * LANES) * E4M3_LESS);
            }
    }
    store_sums<T>(a, m, o, total);
}

// Block i of outputs for rows m and on; `at`: which block of all weights that is.
template <typename T> INLINE void rows(const Linear& a, int64_t m, int64_t i, int64_t at) {
    const uint8_t* w = (const uint8_t*)a.codes + at * a.inputs * BLOCK;
    const float* by = (const float*)a.scales + at * (a.inputs / a.unit) * BLOCK;
    for (; m + ROWS <= a.rows; m += ROWS) outputs<ROWS, T>(a, m, i * BLOCK, w, by);
    for (; ROWS > 4 && m + 4 <= a.rows; m += 4) outputs<4, T>(a, m, i * BLOCK, w, by);
    for (; ROWS > 2 && m + 2 <= a.rows; m += 2) outputs<2, T>(a, m, i * BLOCK, w, by);
    for (; m < a.rows; m++) outputs<1, T>(a, m, i * BLOCK, w, by);
}

template <typename T> void linear(const Linear& a, int part, int parts) {
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    for (int64_t i = share.first; i < share.last; i++) rows<T>(a, 0, i, i);
}

template <typename T> void experts(const Experts& a, int part, int parts) {
    const int64_t blocks = (a.outputs + BLOCK - 1) / BLOCK;
    each_block((const int32_t*)a.offsets, a.experts, blocks, a.taken, part, parts, [&](int64_t e, int64_t i, int64_t m, int64_t last) {
        const T* bias = a.bias ? (const T*)a.bias + e * a.outputs : nullptr;
        const int64_t first = weight_of(a.at, e) * blocks;
        const Linear of = {a.x, a.codes, a.scales, bias, a.y, last, a.inputs, a.outputs, a.pitch, a.unit};
        rows<T>(of, m, i, first + i);
    });
}

void widen_rows(const Widen& a, int part, int parts) {
    const Rows rows(a.offsets, a.experts, a.rows);
    Share share((rows.last - rows.first) * a.inputs, part, parts);
    for (int64_t n = rows.first * a.inputs + share.first; n < rows.first * a.inputs + share.last; n++)
        ((float*)a.y)[n] = widen(((const bf16*)a.x)[n / a.inputs * a.pitch + n % a.inputs]);
}

template <typename T> void dequantize(const Dequantize& a, int part, int parts) {
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    for (int64_t b = share.first; b < share.last; b++) {
        const uint8_t* w = (const uint8_t*)a.codes + b * a.inputs * BLOCK;
        const float* by = (const float*)a.scales + b * (a.inputs / a.unit) * BLOCK;
        const int count = a.outputs - b * BLOCK < BLOCK ? (int)(a.outputs - b * BLOCK) : BLOCK;
        T* y = (T*)a.y + b * BLOCK * a.inputs;
        for (int64_t i = 0; i < a.inputs; i += STEP, w += STEP * BLOCK) {
            alignas(64) float tile[STEP][BLOCK];
            for (int v = 0; v < WIDE; v++) {
                Vec codes[STEP], scale = load(by + i / a.unit * BLOCK + v * LANES) * E4M3_LESS;
                load_e4m3<STEP, BLOCK>(w + v * LANES, codes);
                for (int j = 0; j < STEP; j++) store(tile[j] + v * LANES, codes[j] * scale);
            }
            for (int o = 0; o < count; o++)
                for (int j = 0; j < STEP; j++) y[o * a.inputs + i + j] = narrow<T>(tile[j][o]);
        }
    }
}

// scale = max|w| / 448; codes are w / scale, rounded to the nearest, ties to even.
template <typename T> void encode(const Encode& a, int part, int parts) {
    Share share(a.groups, part, parts);
    for (int64_t g = share.first; g < share.last; g++) {
        const T* w = (const T*)a.weight + g * a.unit;
        Vec most = {};
        for (int64_t j = 0; j < a.unit; j += LANES) {
            Vec x = load(w + j);
            most = max(most, x < 0 ? -x : x);
        }
        float scale = largest(most) / 448, by = scale ? scale : 1;
        for (int64_t j = 0; j < a.unit; j += LANES) {
            Vec x = load(w + j) / by, size = x < 0 ? -x : x;
            size = size < 448 ? size : fill(448);
            Ints bits = (Ints)size, sign = (Ints)(x < 0) & 128;
            Ints usual = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
            Ints small = (Ints)(size + 24576.f) - (Ints)fill(24576.f);  // whole 2^-9
            Ints is_small = size < 0x1p-6f;
            store((int8_t*)a.codes + g * a.unit + j, (is_small & small) | (~is_small & usual) | sign);
        }
        ((float*)a.scales)[g] = scale;
    }
}

OP(e4m3_encode_f32, encode<float>, Encode)
OP(e4m3_encode_bf16, encode<bf16>, Encode)
OP(e4m3_encode_f16, encode<f16>, Encode)
OP(e4m3_widen, widen_rows, Widen)
OP(e4m3_experts_f32, experts<float>, Experts)
OP(e4m3_experts_bf16, experts<bf16>, Experts)
OP(e4m3_linear_f32, linear<float>, Linear)
OP(e4m3_linear_bf16, linear<bf16>, Linear)
OP(e4m3_dequantize_f32, dequantize<float>, Dequantize)
OP(e4m3_dequantize_bf16, dequantize<bf16>, Dequantize)
