// Vectors of floats as wide as the instruction set's registers, and elements in memory as f32, bf16 or f16.
//
// Arithmetic is the compilers' own vector types (GCC and Clang), so that it is written once for every instruction set;
// what they have no word for is intrinsics of x86, NEON and SVE, and plain loops elsewhere: no other file has any. A
// loop of LANES elements a turn ends with one part of a vector: load(p, count) reads no byte behind it.
//
// SVE is compiled for one length of its vectors. Those of 128 bits are NEON's.

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own undefined vectors
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#if __ARM_FEATURE_SVE_BITS > 128
#define SVE 1
#include <arm_sve.h>
#endif
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr bool MANY_REGISTERS = true;  // 32, else 16
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr bool MANY_REGISTERS = false;
#elif defined(SVE)
constexpr int LANES = __ARM_FEATURE_SVE_BITS / 32;
constexpr bool MANY_REGISTERS = true;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr bool MANY_REGISTERS = true;
#else
constexpr int LANES = 4;
constexpr bool MANY_REGISTERS = false;
#endif

// Dot products that only some instruction sets have: of bytes by fours, else of bytes and of 16 bits by pairs; of bf16.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD) || defined(SVE)
#define DOT_FOURS 1
#elif defined(__AVX2__)
#define DOT_PAIRS 1
#endif
#if defined(__aarch64__) && defined(DOT_FOURS) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t FOURS_LESS = 128;  // both factors are signed
#else
constexpr int32_t FOURS_LESS = 0;
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define DOT_BF16 1
#endif

// Whether matrices of bf16 are multiplied much faster than their elements could be one by one.
#if defined(__AMX_TILE__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool BF16_MATRICES = true;
#else
constexpr bool BF16_MATRICES = false;
#endif

#define INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2), may_alias));
typedef Vec VecAnywhere __attribute__((aligned(4)));  // at any element's address
typedef Shorts ShortsAnywhere __attribute__((aligned(2)));
typedef Ints IntsAnywhere __attribute__((aligned(1)));
#if defined(SVE)
#define ALL_LANES svptrue_b32()  // every lane of 32 bits
INLINE Vec widen_halves(Ints x) { return (Vec)svcvt_f32_f16_x(ALL_LANES, svreinterpret_f16_s32((svint32_t)x)); }
#endif

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
#elif defined(SVE)
    return (Vec)((Ints)svld1uh_s32(ALL_LANES, (const uint16_t*)p) << 16);
#elif defined(__aarch64__)
    return (Vec)vshll_n_u16(vld1_u16((const uint16_t*)p), 16);
#else
    return (Vec)(__builtin_convertvector(*(const ShortsAnywhere*)p, Ints) << 16);
#endif
}
INLINE Vec load(const f16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(SVE)
    return widen_halves((Ints)svld1uh_s32(ALL_LANES, (const uint16_t*)p));
#elif defined(__aarch64__)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
    Vec y;
    for (int i = 0; i < LANES; i++) y[i] = widen(p[i]);
    return y;
#endif
}
#if defined(__aarch64__) && !defined(SVE)
INLINE uint8x8_t load_four(const void* p) {  // in both halves
    uint32_t x;
    memcpy(&x, p, 4);
    return vreinterpret_u8_u32(vdup_n_u32(x));
}
#endif
INLINE Vec load(const int8_t* p) {  // GCC 12 would convert them one by one
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(SVE)
    return (Vec)svcvt_f32_s32_x(ALL_LANES, svld1sb_s32(ALL_LANES, p));
#elif defined(__aarch64__)
    return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(p))))));
#else
    Vec y;
    for (int i = 0; i < LANES; i++) y[i] = p[i];
    return y;
#endif
}
INLINE Ints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(SVE)
    return (Ints)svld1ub_s32(ALL_LANES, p);
#elif defined(__aarch64__)
    return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(load_four(p))));
#else
    Ints y;
    for (int i = 0; i < LANES; i++) y[i] = p[i];
    return y;
#endif
}

// N vectors of e4m3 codes, each PITCH bytes behind the one before, E4M3_LESS times too small.
//
// e4m3 is f16 with the exponent's bias 7 instead of 15 and three bits of mantissa: where those bits lie in f16's
// places, the number is 2^8 times too small. Its smallest numbers are f16's smallest, too, which processors that
// convert f16 convert as fast as others; f32 has no such, so that elsewhere they are distinguished.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr float E4M3_LESS = 0x1p8f;
#else
constexpr float E4M3_LESS = 1;
#endif
template <int N, int PITCH> INLINE void load_e4m3(const uint8_t* p, Vec (&y)[N]) {
#if defined(__AVX512F__)
    static_assert(PITCH == LANES && N % 2 == 0, "two vectors are read together");
    const __m512i mask = _mm512_set1_epi16((int16_t)0xbf80);
    for (int i = 0; i < N; i += 2) {
        __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(p + i * PITCH)));
        __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), mask);
        y[i] = (Vec)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        y[i + 1] = (Vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    }
#elif defined(__AVX2__)
    const __m128i mask = _mm_set1_epi16((int16_t)0xbf80);
    for (int i = 0; i < N; i++) {
        __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)(p + i * PITCH)));
        y[i] = (Vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), mask));
    }
#elif defined(SVE)
    for (int i = 0; i < N; i++) {
        Ints wide = (Ints)svld1sb_s32(ALL_LANES, (const int8_t*)p + i * PITCH) << 7;
        y[i] = widen_halves(wide & 0xbf80);
    }
#elif defined(__aarch64__)
    for (int i = 0; i < N; i++) {
        int16x8_t wide = vshll_n_s8(vreinterpret_s8_u8(load_four(p + i * PITCH)), 7);
        uint16x4_t halves = vand_u16(vreinterpret_u16_s16(vget_low_s16(wide)), vdup_n_u16(0xbf80));
        y[i] = (Vec)vcvt_f32_f16(vreinterpret_f16_u16(halves));
    }
#else
    for (int i = 0; i < N; i++) {
        Ints code = load_bytes(p + i * PITCH);
        Ints size = (code & 127) << 20;
        Ints small = size < 8 << 20;  // without the leading one: it is added, and subtracted again
        Vec number = (Vec)(size + (120 << 23) + (small & 1 << 23)) - (Vec)(small & 121 << 23);
        y[i] = (Vec)((Ints)number | (code & 128) << 24);
    }
#endif
}

// Looks up a table of 16 bytes at each byte of `at`, all below 16; the table's address is a multiple of 16.
INLINE Ints look_up(const uint8_t* table, Ints at) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(*(const __m128i*)table), (__m512i)at);
#elif defined(__AVX2__)
    return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*(const __m128i*)table), (__m256i)at);
#elif defined(SVE)
    return (Ints)svtbl_u8(svld1rq_u8(svptrue_b8(), table), svreinterpret_u8_s32((svint32_t)at));
#elif defined(__aarch64__)
    return (Ints)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)at);
#else
    uint8_t each[4 * LANES];
    memcpy(each, &at, sizeof(each));
    for (int j = 0; j < 4 * LANES; j++) each[j] = table[each[j]];
    Ints found;
    memcpy(&found, each, sizeof(each));
    return found;
#endif
}
// Looks sixteen bytes up; `at` and `y` may be the same.
INLINE void look_up(const uint8_t* table, const uint8_t* at, uint8_t* y) {
#if defined(__SSSE3__)
    const __m128i found = _mm_shuffle_epi8(*(const __m128i*)table, _mm_loadu_si128((const __m128i*)at));
    _mm_storeu_si128((__m128i*)y, found);
#elif defined(__aarch64__)
    vst1q_u8(y, vqtbl1q_u8(vld1q_u8(table), vld1q_u8(at)));
#else
    for (int i = 0; i < 16; i++) y[i] = table[at[i]];
#endif
}

INLINE void store(float* p, Vec x) { *(VecAnywhere*)p = x; }
INLINE void store(int8_t* p, Ints x) {  // their lowest bytes
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(SVE)
    svst1b_s32(ALL_LANES, p, (svint32_t)x);
#elif defined(__aarch64__)
    const int16x4_t halves = vmovn_s32((int32x4_t)x);
    const uint32x2_t bytes = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(halves, halves)));
    memcpy(p, &bytes, 4);
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)x[i];
#endif
}
INLINE void store(bf16* p, Vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif defined(SVE) && defined(DOT_BF16)
    svst1h_u32(ALL_LANES, (uint16_t*)p, svreinterpret_u32_bf16(svcvt_bf16_f32_x(ALL_LANES, (svfloat32_t)x)));
#elif defined(DOT_BF16)
    vst1_u16((uint16_t*)p, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x)));
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
#elif defined(SVE)
    svst1h_s32(ALL_LANES, (int16_t*)p, (svint32_t)y);
#else
    *(ShortsAnywhere*)p = __builtin_convertvector(y, Shorts);
#endif
#endif
}

// `count` elements, 0 < count <= LANES; zeros behind them.
template <typename T> INLINE Vec load(const T* p, int64_t count) {
    if (count == LANES) return load(p);
    T room[LANES] = {};
    memcpy(room, p, count * sizeof(T));
    return load(room);
}
template <typename T> INLINE void store(T* p, Vec x, int64_t count) {
    if (count == LANES) return store(p, x);
    T room[LANES];
    store(room, x);
    memcpy(p, room, count * sizeof(T));
}

// Calls f(i, n) for the n elements from i on, for each n-tile of first..last - 1: n is LANES, but for the last one.
#define STRIP [&](int64_t i, int64_t n) __attribute__((always_inline))
template <typename F> INLINE void strips(int64_t first, int64_t last, F f) {
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) f(i, LANES);
    if (i < last) f(i, last - i);
}

// To the nearest, ties to even.
INLINE Ints nearest(Vec x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(SVE)
    return (Ints)svcvt_s32_f32_x(ALL_LANES, svrintn_f32_x(ALL_LANES, (svfloat32_t)x));
#elif defined(__aarch64__)
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    Ints y;
    for (int i = 0; i < LANES; i++) y[i] = (int32_t)__builtin_rintf(x[i]);
    return y;
#endif
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
#elif defined(SVE)
    for (int i = 0; i < 4; i++) y[i] = svaddv_f32(ALL_LANES, (svfloat32_t)x[i]);
#elif defined(__aarch64__)
    const float32x4_t low = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]);
    const float32x4_t high = vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]);
    vst1q_f32(y, vpaddq_f32(low, high));
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
#elif defined(SVE)
    return svaddv_f32(ALL_LANES, (svfloat32_t)x);
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)x);
#else
    float y = 0;
    for (int j = 0; j < LANES; j++) y += x[j];
    return y;
#endif
}
INLINE int32_t sum(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(SVE)
    return (int32_t)svaddv_s32(ALL_LANES, (svint32_t)x);
#elif defined(__aarch64__)
    return vaddvq_s32((int32x4_t)x);
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

#if defined(DOT_FOURS)
// total + the dot products of each four bytes of `codes`, not negative, of which FOURS_LESS is taken, and of x, signed.
#if defined(__AVX512VNNI__)
INLINE Ints dot_fours(Ints total, Ints codes, Ints x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)x);
}
#elif defined(SVE)
INLINE Ints dot_fours(Ints total, Ints codes, Ints x) {
    const svint8_t factors = svreinterpret_s8_s32((svint32_t)x);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)svusdot_s32((svint32_t)total, svreinterpret_u8_s32((svint32_t)codes), factors);
#else
    const svuint8_t less = sveor_n_u8_x(svptrue_b8(), svreinterpret_u8_s32((svint32_t)codes), 128);
    return (Ints)svdot_s32((svint32_t)total, svreinterpret_s8_u8(less), factors);
#endif
}
#elif defined(__ARM_FEATURE_MATMUL_INT8)
INLINE Ints dot_fours(Ints total, Ints codes, Ints x) {
    return (Ints)vusdotq_s32((int32x4_t)total, (uint8x16_t)codes, (int8x16_t)x);
}
#else
INLINE Ints dot_fours(Ints total, Ints codes, Ints x) {
    return (Ints)vdotq_s32((int32x4_t)total, (int8x16_t)((uint8x16_t)codes ^ 128), (int8x16_t)x);
}
#endif
#elif defined(DOT_PAIRS)
// Sums of two neighbours' products: of numbers of 16 bits; of bytes, those of codes not negative, to 16 bits.
#if defined(__AVX512F__)
INLINE Ints dot_pairs(Ints codes, Ints x) { return (Ints)_mm512_madd_epi16((__m512i)codes, (__m512i)x); }
INLINE Ints dot_bytes(Ints codes, Ints x) { return (Ints)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x); }
#else
INLINE Ints dot_pairs(Ints codes, Ints x) { return (Ints)_mm256_madd_epi16((__m256i)codes, (__m256i)x); }
INLINE Ints dot_bytes(Ints codes, Ints x) { return (Ints)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x); }
#endif
// Their lower 16 bits, which hold all of them. Of each four the second and the third change places.
INLINE void store_pairs(int16_t* p, Ints x) {
    constexpr int ORDER = 0xd8;
#if defined(__AVX512F__)
    __m256i y = _mm512_cvtepi32_epi16((__m512i)x);
    _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(y, ORDER), ORDER));
#else
    __m128i y = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    _mm_storeu_si128((__m128i*)p, _mm_shufflehi_epi16(_mm_shufflelo_epi16(y, ORDER), ORDER));
#endif
}
#endif

#if defined(__AVX512BF16__)
typedef __m512bh Bf16s;  // 2 LANES
INLINE Bf16s load_bf16s(const bf16* p) { return (Bf16s)_mm512_loadu_si512(p); }
INLINE Bf16s load_bf16s(const bf16* p, int64_t count) {  // zeros behind them
    return (Bf16s)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
}
// total + the dot products of each two.
INLINE Vec dot_bf16s(Vec total, Bf16s a, Bf16s b) { return (Vec)_mm512_dpbf16_ps((__m512)total, a, b); }
#elif defined(SVE) && defined(DOT_BF16)
typedef svbfloat16_t Bf16s __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
INLINE Bf16s load_bf16s(const bf16* p) { return svld1_bf16(svptrue_b16(), (const bfloat16_t*)p); }
INLINE Bf16s load_bf16s(const bf16* p, int64_t count) {
    return svld1_bf16(svwhilelt_b16_s64(0, count), (const bfloat16_t*)p);
}
INLINE Vec dot_bf16s(Vec total, Bf16s a, Bf16s b) { return (Vec)svbfdot_f32((svfloat32_t)total, a, b); }
#elif defined(DOT_BF16)
typedef bfloat16x8_t Bf16s;
INLINE Bf16s load_bf16s(const bf16* p) { return vreinterpretq_bf16_u16(vld1q_u16((const uint16_t*)p)); }
INLINE Bf16s load_bf16s(const bf16* p, int64_t count) {
    uint16_t room[2 * LANES] = {};
    memcpy(room, p, count * 2);
    return vreinterpretq_bf16_u16(vld1q_u16(room));
}
INLINE Vec dot_bf16s(Vec total, Bf16s a, Bf16s b) { return (Vec)vbfdotq_f32((float32x4_t)total, a, b); }
#endif

#if defined(__AVX512F__)
// Sixteen vectors of sixteen: each step puts elements of rows k and k + 8 in turn.
INLINE void transpose(Vec (&x)[LANES]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int step = 0; step < 4; step++) {
        Vec y[LANES];
#pragma GCC unroll 8
        for (int k = 0; k < LANES / 2; k++) {
            y[2 * k] = (Vec)_mm512_permutex2var_ps((__m512)x[k], low, (__m512)x[k + LANES / 2]);
            y[2 * k + 1] = (Vec)_mm512_permutex2var_ps((__m512)x[k], high, (__m512)x[k + LANES / 2]);
        }
        memcpy(x, y, sizeof(y));
    }
}
#endif

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
