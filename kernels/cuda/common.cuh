// Parts that all kernels share. No header is included: NVRTC finds none where only pip's libraries are installed.

struct bf16 {
    unsigned short bits;
};
struct f16 {
    unsigned short bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <class E> __device__ inline E from_float(float x);  // rounded to nearest even
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ inline f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

__device__ inline float exp2_approx(float x) {  // of 2
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Activations, by their place in ACTIVATIONS of kernels/activation/activation.py: the lower KIND_BITS of ACT. Above
// them is the limit of clamped ones, in 1 / LIMIT_UNITS. A test holds these numbers to the ones there.
enum { SILU, GELU, GELU_TANH, RELU2, CLAMPED_SWIGLU, CLAMPED_SILU, SILU_CLAMPED };

// act(gate) * up. Where that is rounded to 16 bits, by approximate instructions, which err by far less: an exponential
// and an IEEE division are 30 instructions for four bytes that come from memory.
template <class E, int ACT> __device__ inline float activated(float gate, float up) {
    constexpr int KIND_BITS = 4, KIND = ACT & ((1 << KIND_BITS) - 1);
    if constexpr (KIND == GELU) return 0.5f * gate * (1 + erff(gate * 0.7071067811865476f)) * up;
    if constexpr (KIND == RELU2) return gate > 0 ? gate * gate * up : 0;
    constexpr int LIMIT_UNITS = 1024;
    constexpr float limit = (float)(ACT >> KIND_BITS) / LIMIT_UNITS;
    if constexpr (KIND == CLAMPED_SWIGLU || KIND == CLAMPED_SILU) gate = gate > limit ? limit : gate;  // NaNs stay NaNs
    if constexpr (limit > 0) {
        up = (up > limit ? limit : up < -limit ? -limit : up) + (KIND == CLAMPED_SWIGLU ? 1 : 0);
    }
    float z = gate;  // the others are gate * sigmoid(z)
    if constexpr (KIND == CLAMPED_SWIGLU) {
        constexpr float SLOPE = 1.702f;
        z = SLOPE * gate;
    }
    if constexpr (KIND == GELU_TANH) z = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    float y;
    if constexpr (sizeof(E) > 2) {
        y = gate / (1.0f + expf(-z));
    } else {
        float by;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(by) : "f"(1 + exp2_approx(z * -1.4426950408889634f)));
        y = gate * by;
    }
    if constexpr (KIND == SILU_CLAMPED) y = y > limit ? limit : y;
    return y * up;
}

// A gated activation of GEMM outputs, which are rounded first, as they are where the GEMM is a kernel of its own.
template <class E, int ACT> __device__ inline float gated(float gate, float up) {
    return activated<E, ACT>(to_float(from_float<E>(gate)), to_float(from_float<E>(up)));
}

// Two elements of one register, the first in its lower half.
template <class E> __device__ inline float2 unpack(unsigned x);
template <> __device__ inline float2 unpack<bf16>(unsigned x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
template <> __device__ inline float2 unpack<f16>(unsigned x) {
    return {to_float(f16{(unsigned short)x}), to_float(f16{(unsigned short)(x >> 16)})};
}

// N elements that are loaded and stored at once; their address must be a multiple of their size.
template <class E, int N> struct alignas(sizeof(E) * N) Vec {
    E x[N];
};

// From here on memory that earlier kernels of the stream wrote may be read, and what they read may be written.
__device__ inline void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be started as soon as all blocks have come here; its grid_wait() still awaits the end of this
// one. What it may read before is what no kernel writes, as weights, unless this comes after this kernel's own
// grid_wait(): then all that earlier kernels wrote.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Prefetches 128 bytes into the second-level cache, for all blocks.
__device__ inline void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Loads past the first-level cache; 0 if `there` is false. It is awaited where it is used: behind a
// branch, the compiler would wait at the branch's end.
__device__ inline int load_if(const int* from, bool there) {
    int y = 0;
    asm volatile("{ .reg .pred there; setp.ne.b32 there, %2, 0; @there ld.global.cg.s32 %0, [%1]; }"
                 : "+r"(y)
                 : "l"(from), "r"((int)there)
                 : "memory");
    return y;
}

// How many have counted. What those wrote before may be read, past the first-level cache, by threads that meet this one
// afterwards.
__device__ inline int counted(const int* count) {
    int y;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(y) : "l"(count) : "memory");
    return y;
}

// Until others have counted this far: then what they wrote before may be read, past the first-level cache.
__device__ inline void wait_for_count(const int* count, int least) {
    while (counted(count) < least) {}
}

__device__ inline unsigned long long nanoseconds() {
    unsigned long long y;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(y));
    return y;
}

// Waits at most so many nanoseconds for a count, and returns whether it has come to `least`.
__device__ inline bool wait_briefly_for_count(const int* count, int least, unsigned long long limit) {
    if (counted(count) >= least) return true;
    for (const unsigned long long start = nanoseconds(); nanoseconds() - start < limit;)
        if (counted(count) >= least) return true;
    return false;
}

// Generic stores to global memory before it are seen by TMA loads that come after the thread has synchronised with
// theirs.
__device__ inline void fence_tma_reads() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// One more block, whose threads have met; how many had before. What those wrote may be read, past the first-level
// cache, by threads that meet this one afterwards.
__device__ inline int add_one(int* count) {
    int y;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(y) : "l"(count) : "memory");
    return y;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Bytes that are read once: they need not displace anything in the first-level cache.
__device__ inline uint4 stream16(const void* from) {
    uint4 y;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "l"(from));
    return y;
}
__device__ inline uint2 stream8(const void* from) {
    uint2 y;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "l"(from));
    return y;
}
__device__ inline unsigned stream4(const void* from) {
    unsigned y;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(y) : "l"(from));
    return y;
}

// Shared memory by its address there.
__device__ inline unsigned smem_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ inline uint4 load_shared16(unsigned from) {
    uint4 y;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "r"(from)
                 : "memory");
    return y;
}
__device__ inline uint2 load_shared8(unsigned from) {
    uint2 y;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "r"(from) : "memory");
    return y;
}
__device__ inline unsigned load_shared4(unsigned from) {
    unsigned y;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(from) : "memory");
    return y;
}

// A barrier of so many threads, all of each warp; number 0 is __syncthreads().
template <int THREADS> __device__ inline void block_sync(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
// Arrives at a barrier for threads that others wait for, and that go on.
template <int THREADS> __device__ inline void block_arrive(int number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
