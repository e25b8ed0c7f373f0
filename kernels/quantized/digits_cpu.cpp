// x [rows, inputs] in digits, as the operations of weights in blocks read it: digits.h, blocks.h.

#include "op.h"
#include "simd.h"
#include "digits.h"

struct Split {
    const void* x;
    void* y;  // [rows] of row_bytes
    int64_t rows, inputs, pitch;
};

template <typename T> void split(const Split& a, int part, int parts) {
    const int64_t runs = a.inputs / RUN;
    Share share(a.rows * runs, part, parts);
    for (int64_t n = share.first; n < share.last; n++) {
        const T* x = (const T*)a.x + n / runs * a.pitch + n % runs * RUN;
        uint8_t* row = (uint8_t*)a.y + n / runs * row_bytes<T>(a.inputs);
        Sums& to = ((Sums*)sums_of<T>(row, a.inputs))[n % runs];
#if defined(__AVX512VNNI__)
        constexpr int BITS = 8 * DIGITS<T> - 2;  // numbers are below 2^BITS, of runs that are not tiny
        Vec values[2] = {load(x), load(x + LANES)};
        float most = largest(max(values[0] < 0 ? -values[0] : values[0], values[1] < 0 ? -values[1] : values[1]));
        int32_t bits;
        memcpy(&bits, &most, 4);
        int32_t exponent = bits >> 23 < 30 ? 30 : bits >> 23;
        int32_t up = (253 + BITS - exponent) << 23, down = (exponent + 1 - BITS) << 23;
        float factor;
        memcpy(&factor, &up, 4);
        memcpy(&to.scale, &down, 4);
        bool finite = sum(values[0] * 0 + values[1] * 0) == 0;
        if (!finite) to.scale = __builtin_nanf("");
        for (int j = 0; j < 2; j++) {
            Ints left = (Ints)_mm512_cvtps_epi32((__m512)(values[j] * factor));
            int32_t whole[DIGITS<T>];
            for (int d = 0; d < DIGITS<T>; d++) {
                Ints digit = left << 24 >> 24;
                store((int8_t*)row + d * a.inputs + n % runs * RUN + j * LANES, digit);
                whole[d] = _mm512_reduce_add_epi32((__m512i)digit);
                left = (left - digit) >> 8;
            }
            to.low[j] = whole[1] * 256 + whole[0];
            to.high[j] = DIGITS<T> == 3 ? whole[DIGITS<T> - 1] : 0;
            to.sums[j] = ((float)to.high[j] * 65536 + (float)to.low[j]) * to.scale;
        }
#else
        for (int j = 0; j < 2; j++) {
            to.sums[j] = 0;
            for (int i = 0; i < RUN / 2; i++) to.sums[j] += widen(x[j * (RUN / 2) + i]);
        }
#endif
    }
}

OP(split_f32, split<float>, Split)
OP(split_bf16, split<bf16>, Split)
