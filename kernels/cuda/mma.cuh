// Tensor-core operations of a warp: tiles of 8 rows of 16 bytes from shared memory, and matmuls of them, from sm_80
// on.

#define MINUS_INFINITY __int_as_float(0xff800000)  // -infinity
#define LOG2_E 1.4426950408889634f

template <int N> __device__ inline void ldmatrix(unsigned (&y)[N], unsigned from) {
    if constexpr (N == 4)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                     : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(y[0]), "=r"(y[1]) : "r"(from) : "memory");
}

// Each tile across: a lane has elements of a column.
__device__ inline void ldmatrix_transposed(unsigned (&y)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                 : "r"(from) : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8].
template <class E>
__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
#define MMA(type, name)                                                                                            \
    template <>                                                                                                         \
    __device__ inline void mma<type>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {            \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, "                   \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                    \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                   \
    }
MMA(bf16, "bf16")
MMA(f16, "f16")
#undef MMA

template <class E> __device__ inline unsigned pack(float a, float b);  // a in the lower half
template <> __device__ inline unsigned pack<bf16>(float a, float b) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}
template <> __device__ inline unsigned pack<f16>(float a, float b) {
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}

// Transposes a tile's 8 rows: a lane has two elements of a row, and then two of the column.
__device__ inline unsigned transpose_8x8(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// b of the lane that has not this bit for a of the one that has.
__device__ inline void swap_lanes(unsigned& a, unsigned& b, int bit) {
    const bool upper = threadIdx.x & bit;
    const unsigned got = __shfl_xor_sync(~0u, upper ? a : b, bit);
    (upper ? a : b) = got;
}

// Four lanes exchange two elements each of four runs of 8 elements: each has one run then, to be stored at once.
__device__ inline void exchange_quads(unsigned (&x)[4]) {
    swap_lanes(x[0], x[1], 1), swap_lanes(x[2], x[3], 1);
    swap_lanes(x[0], x[2], 2), swap_lanes(x[1], x[3], 2);
}


// A score to the base 2 from a dot product, with a soft cap where HAS_SOFTCAP: softcap tanh(x / softcap). `scale` has
// log2(e) in it. The instruction errs by 2^-11 of the score, operands of 16 bits by more.
template <bool HAS_SOFTCAP> __device__ inline float score(float dot, float scale, float softcap) {
    if (!HAS_SOFTCAP) return dot * scale;
    const float c = softcap * LOG2_E;
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(dot * (scale / c)));
    return c * y;
}
