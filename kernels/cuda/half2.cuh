// Two 16-bit elements in one register.

// x & mask ^ with as one instruction: of C the compiler makes two, as it keeps neither constant in a register.
__device__ inline unsigned and_xor(unsigned x, unsigned mask, unsigned with) {
    unsigned y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(with));
    return y;
}

// Bits of x where mask has ones, else of y.
__device__ inline unsigned chosen_bits(unsigned x, unsigned y, unsigned mask) {
    unsigned z;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(z) : "r"(x), "r"(y), "r"(mask));
    return z;
}

// a b + c of both, rounded once.
template <class E> __device__ inline unsigned fma2(unsigned a, unsigned b, unsigned c);
template <> __device__ inline unsigned fma2<f16>(unsigned a, unsigned b, unsigned c) {
    unsigned y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
template <> __device__ inline unsigned fma2<bf16>(unsigned a, unsigned b, unsigned c) {
    unsigned y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// a b of both, rounded once.
template <class E> __device__ inline unsigned mul2(unsigned a, unsigned b);
template <> __device__ inline unsigned mul2<f16>(unsigned a, unsigned b) {
    unsigned y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
template <> __device__ inline unsigned mul2<bf16>(unsigned a, unsigned b) {
    return fma2<bf16>(a, b, 0x80008000);  // sm_80 has no multiplication alone; - 0
}

// The sum of both, rounded once: exact where codes of quantised weights are made.
template <class E> __device__ inline unsigned add2(unsigned a, unsigned b);
template <> __device__ inline unsigned add2<bf16>(unsigned a, unsigned b) {
    return fma2<bf16>(a, 0x3f803f80, b);  // sm_80 has no addition
}
template <> __device__ inline unsigned add2<f16>(unsigned a, unsigned b) {
    unsigned y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Two floats in e4m3, the first in the lower byte, rounded to nearest even; what is larger than 448 becomes that, NaN stays
// NaN. For sm_90 and later.
__device__ inline unsigned to_e4m3x2(float first, float second) {
    unsigned short y = 0;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(second), "f"(first));
#endif
    return y;
}

// Four codes of e4m3 as f16, which has every one: the lower two and the upper two. Before sm_90 by hand, of all but NaN.
__device__ inline void e4m3x4_to_f16(unsigned codes, unsigned& low, unsigned& high) {
#if __CUDA_ARCH__ < 900
    auto pair = [](unsigned x) {  // codes in bytes 0 and 2; an exponent of f16 is 8 more
        return mul2<f16>((x & 0x00800080) << 8 | (x & 0x007f007f) << 7, 0x5c005c00);
    };
    low = pair(__byte_perm(codes, 0, 0x4140)), high = pair(__byte_perm(codes, 0, 0x4342));
#else
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(low), "=r"(high) : "r"(codes));
#endif
}
