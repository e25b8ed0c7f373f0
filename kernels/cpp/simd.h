// Vectors of floats as wide as the instruction set's registers, and elements in memory as f32, bf16 or f16.
//
// Arithmetic is the compilers' own vector types (GCC and Clang), so that it is written once for every instruction set;
// what they have no word for is intrinsics on x86 and plain loops elsewhere. A loop of LANES elements a turn ends with
// one part of a vector: load(p, count) reads no byte behind it.

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own undefined vectors
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2), may_alias));
typedef Vec VecAnywhere __attribute__((aligned(4)));  // at any element's address
typedef Shorts ShortsAnywhere __attribute__((aligned(2)));
typedef Ints IntsAnywhere __attribute__((aligned(1)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE float widen(f16 x) {
    uint32_t bits = (uint32_t)(x.bits & 0x7fff) << 13 | ((x.bits & 0x7c00) == 0x7c00 ? 0x70000000 : 0);
    float y;
    memcpy(&y, &bits, 4);
    y *= (x.bits & 0x7c00) == 0x7c00 ? 1 : 0x1p112f;
    return x.bits & 0x8000 ? -y : y;
}

template <typename T> INLINE T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {  // to the nearest, ties to even; NaNs stay NaNs
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return {(uint16_t)(bits >> 16 | 64)};
    return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <> inline f16 narrow<f16>(float x) {  // likewise; from 65520 on, infinity
    uint32_t bits, low;
    memcpy(&bits, &x, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    if (x != x) return {(uint16_t)(sign | 0x7e00)};
    float size = __builtin_fabsf(x), raised = size + 0.5f;  // whose last bit is that of f16's smallest numbers
    size = size > 65536 ? 65536 : size;
    memcpy(&low, &raised, 4);
    memcpy(&bits, &size, 4);
    uint32_t normal = bits - (112 << 23);
    normal = (normal + 0xfff + (normal >> 13 & 1)) >> 13;
    return {(uint16_t)(sign | (size < 0x1p-14f ? low - 0x3f000000 : normal))};
}

INLINE Vec fill(float x) { return x - (Vec){}; }

INLINE Vec load(const float* p) { return *(const VecAnywhere*)p; }
INLINE Vec load(const bf16* p) {  // GCC 12 would convert halves of a vector, and put them together
#if defined(__AVX512F__)
    return (Vec)((Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
    return (Vec)((Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
    return (Vec)(__builtin_convertvector(*(const ShortsAnywhere*)p, Ints) << 16);
#endif
}
INLINE Vec load(const f16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    Vec y;
    for (int i = 0; i < LANES; i++) y[i] = widen(p[i]);
    return y;
#endif
}
INLINE Vec load(const int8_t* p) {  // GCC 12 would convert them one by one
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    Vec y;
    for (int i = 0; i < LANES; i++) y[i] = p[i];
    return y;
#endif
}
INLINE void store(float* p, Vec x) { *(VecAnywhere*)p = x; }
INLINE void store(int8_t* p, Ints x) {  // their lowest bytes
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)x[i];
#endif
}
INLINE void store(bf16* p, Vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    Ints bits = (Ints)x;
    Ints rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    Ints nan = x != x;  // all bits where it is one
    Ints y = (nan & (bits >> 16 | 64)) | (~nan & rounded);
    y &= 0xffff;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)y));
#elif defined(__AVX2__)
    __m256i both = (__m256i)y;
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
#else
    *(ShortsAnywhere*)p = __builtin_convertvector(y, Shorts);
#endif
#endif
}

// `count` elements, 0 < count < LANES; zeros behind them.
template <typename T> INLINE Vec load(const T* p, int64_t count) {
    T room[LANES] = {};
    memcpy(room, p, count * sizeof(T));
    return load(room);
}
template <typename T> INLINE void store(T* p, Vec x, int64_t count) {
    T room[LANES];
    store(room, x);
    memcpy(p, room, count * sizeof(T));
}

INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where one is NaN

// The four vectors' sums, to y[0..3].
INLINE void sums(const Vec* x, float* y) {
#if defined(__AVX2__)
    __m256 half[4];
    for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
        half[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)x[i]), _mm512_extractf32x8_ps((__m512)x[i], 1));
#else
        half[i] = (__m256)x[i];
#endif
    }
    __m256 two = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#else
    for (int i = 0; i < 4; i++) {
        y[i] = 0;
        for (int j = 0; j < LANES; j++) y[i] += x[i][j];
    }
#endif
}
INLINE float sum(Vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float y = 0;
    for (int j = 0; j < LANES; j++) y += x[j];
    return y;
#endif
}
INLINE int32_t sum(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t y = 0;
    for (int j = 0; j < LANES; j++) y += x[j];
    return y;
#endif
}
INLINE float largest(Vec x) {
    float y = x[0];
    for (int j = 1; j < LANES; j++) y = x[j] > y ? x[j] : y;
    return y;
}

// e ** x, to about a unit in the last place; next to nothing below -87, about 2e38 from 88 on. NaNs stay NaNs.
INLINE Vec exp(Vec x) {
    x = fill(-87) > x ? fill(-87) : x;
    x = fill(88) < x ? fill(88) : x;
    const Vec shift = fill(12582912);  // 1.5 * 2 ** 23: added, the whole part is in the low bits
    Vec shifted = x * 1.4426950408889634f + shift;
    Vec n = shifted - shift;
    Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // |r| <= ln(2) / 2
    Vec p = r * (1.f / 5040) + 1.f / 720;                  // Taylor's coefficients
    p = r * p + 1.f / 120;
    p = r * p + 1.f / 24;
    p = r * p + 1.f / 6;
    p = r * p + 0.5f;
    p = r * p + 1;
    p = r * p + 1;
    return p * (Vec)(((Ints)shifted - (Ints)shift + 127) << 23);
}

// To about a unit in the last place of the result: by its series near 0, where the difference from 1 would lose digits.
INLINE Vec tanh(Vec x) {
    Vec s = x * x;
    Vec p = s * (-1382.f / 155925) + 62.f / 2835;
    p = s * p - 17.f / 315;
    p = s * p + 2.f / 15;
    p = s * p - 1.f / 3;
    p = s * p * x + x;
    return s < 0.09f ? p : 1 - 2 / (exp(2 * x) + 1);
}
