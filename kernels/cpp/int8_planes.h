// Rows of x as whole numbers, for dot products with bytes. Included after op.h and simd.h.
//
// Each run of 32 inputs is numbers sum_d int8 planes[d] 256^d times a scale, in signed int8 planes of base 256: three
// of 23 bits where x is f32, so that it is as exact as in f32 next to its run's largest; two of 15 bits where it is
// bf16, whose own numbers have 8. Of a row: the inputs' first int8 planes, their second, their third, and then a Sums
// for each run. AVX2 without VNNI has the first two as one number of 16 bits, and of each four such numbers the second
// and the third have changed places; the third is as it was.

constexpr int RUN = 32;  // inputs

struct Sums {
    int32_t low[2], high[2];  // of each half, sums of the first two int8 planes, and of the third
    float sums[2], scale;     // sums of x itself
};
static_assert(sizeof(Sums) == 28, "RUN_BYTES in blocks_cpu.py counts them");

template <typename T> constexpr int PLANES = 3;
template <> constexpr int PLANES<bf16> = 2;

template <typename T> INLINE int64_t row_bytes(int64_t inputs) {
    return inputs * PLANES<T> + inputs / RUN * (int64_t)sizeof(Sums);
}
template <typename T> INLINE const Sums* sums_of(const uint8_t* row, int64_t inputs) {
    return (const Sums*)(row + inputs * PLANES<T>);
}
