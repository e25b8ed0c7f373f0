// Hopper's asynchronous tensor-core matmuls, whose operands lie in shared memory, mostly in boxes of 128 bytes with
// TMA's 128-byte swizzle (PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate). Four warps do each of
// them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The operand that begins at `start`: boxes of 8 rows of 128 bytes, 1024 bytes apart, and `apart` bytes from one run of
// 64 elements to the next where the rows are the sum's (PTX ISA, Shared Memory Matrix Layout).
__device__ inline unsigned long long smem_descriptor(unsigned start, int apart) {
    return 1ull << 62 | (unsigned long long)(1024 >> 4) << 32 | (unsigned long long)(apart >> 4) << 16 | (start & 0x3ffff) >> 4;
}

// The operand that begins at `start` without swizzling: tiles of 8 rows of 16 bytes, `leading` bytes from one to the next
// along a row, and `stride` bytes from one to the next across rows.
__device__ inline unsigned long long plain_descriptor(unsigned start, int leading, int stride) {
    return (unsigned long long)(stride >> 4) << 32 | (unsigned long long)(leading >> 4) << 16 | (start & 0x3ffff) >> 4;
}

// The same, of an operand that begins so many bytes later.
__device__ inline unsigned long long descriptor_at(unsigned long long descriptor, int bytes) {
    return (descriptor & ~0ull << 32) | (unsigned)descriptor + (bytes >> 4);
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the groups of matmuls are under way.
template <int N> __device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Registers that matmuls under way read or write must not be moved past here.
template <int N> __device__ inline void fence_registers(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
// Registers of each thread of this warpgroup from here on: more, or fewer.
template <int N> __device__ inline void set_registers(bool more) {
    if (more)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// The registers of a sum, by their number.
#define D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D16 D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D24 D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define D32 D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define D40 D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define D48 D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define D56 D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define D64 D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define D72 D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define D80 D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define D88 D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define D96 D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define D104 D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define D112 D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define D120 D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define D128 D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SIXTEEN(d, i) EIGHT(d, i), EIGHT(d, i + 8)
#define SIXTY_FOUR(d, i) SIXTEEN(d, i), SIXTEEN(d, i + 16), SIXTEEN(d, i + 32), SIXTEEN(d, i + 48)

// c [64, n] = or += a [64, 16] b [n, 16], a in registers: with ACROSS b is [16, n].
#define OF_REGISTERS(type, name, n, sums, a0, a1, a2, a3, b0, more, across, ...)                                         \
    template <bool ACROSS> __device__ inline void wgmma(type, float (&c)[n / 2], const unsigned (&a)[4],             \
                                                           unsigned long long b, bool add) {                            \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, " more ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32."  \
                     name "." name " {" sums "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b0 ", add, 1, 1, " across "; }"    \
                     : __VA_ARGS__                                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)ACROSS));            \
    }
// Multiplies a and b [n, 16] in shared memory.
#define OF_SHARED(type, name, n, sums, a0, b0, more, ...)                                                                \
    __device__ inline void wgmma(type, float (&c)[n / 2], unsigned long long a, unsigned long long b, bool add) {    \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, " more ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32."  \
                     name "." name " {" sums "}, " a0 ", " b0 ", add, 1, 1, 0, 0; }"                                    \
                     : __VA_ARGS__                                                                                      \
                     : "l"(a), "l"(b), "r"((int)add));                                                                  \
    }
#define WGMMA(type, name)                                                                                               \
    OF_REGISTERS(type, name, 16, D8, "%8", "%9", "%10", "%11", "%12", "%13", "%14", EIGHT(c, 0))                        \
    OF_REGISTERS(type, name, 32, D16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", SIXTEEN(c, 0))                   \
    OF_REGISTERS(type, name, 48, D24, "%24", "%25", "%26", "%27", "%28", "%29", "%30", SIXTEEN(c, 0), EIGHT(c, 16))     \
    OF_REGISTERS(type, name, 64, D32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", SIXTEEN(c, 0), SIXTEEN(c, 16))   \
    OF_REGISTERS(type, name, 80, D40, "%40", "%41", "%42", "%43", "%44", "%45", "%46", SIXTEEN(c, 0), SIXTEEN(c, 16),   \
                 EIGHT(c, 32))                                                                                          \
    OF_REGISTERS(type, name, 96, D48, "%48", "%49", "%50", "%51", "%52", "%53", "%54", SIXTEEN(c, 0), SIXTEEN(c, 16),   \
                 SIXTEEN(c, 32))                                                                                        \
    OF_REGISTERS(type, name, 112, D56, "%56", "%57", "%58", "%59", "%60", "%61", "%62", SIXTEEN(c, 0), SIXTEEN(c, 16),  \
                 SIXTEEN(c, 32), EIGHT(c, 48))                                                                          \
    OF_REGISTERS(type, name, 128, D64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", SIXTY_FOUR(c, 0))               \
    OF_REGISTERS(type, name, 144, D72, "%72", "%73", "%74", "%75", "%76", "%77", "%78", SIXTY_FOUR(c, 0),               \
                 EIGHT(c, 64))                                                                                          \
    OF_REGISTERS(type, name, 160, D80, "%80", "%81", "%82", "%83", "%84", "%85", "%86", SIXTY_FOUR(c, 0),               \
                 SIXTEEN(c, 64))                                                                                        \
    OF_REGISTERS(type, name, 176, D88, "%88", "%89", "%90", "%91", "%92", "%93", "%94", SIXTY_FOUR(c, 0),               \
                 SIXTEEN(c, 64), EIGHT(c, 80))                                                                          \
    OF_REGISTERS(type, name, 192, D96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", SIXTY_FOUR(c, 0),            \
                 SIXTEEN(c, 64), SIXTEEN(c, 80))                                                                        \
    OF_REGISTERS(type, name, 208, D104, "%104", "%105", "%106", "%107", "%108", "%109", "%110", SIXTY_FOUR(c, 0),       \
                 SIXTEEN(c, 64), SIXTEEN(c, 80), EIGHT(c, 96))                                                          \
    OF_REGISTERS(type, name, 224, D112, "%112", "%113", "%114", "%115", "%116", "%117", "%118", SIXTY_FOUR(c, 0),       \
                 SIXTEEN(c, 64), SIXTEEN(c, 80), SIXTEEN(c, 96))                                                        \
    OF_REGISTERS(type, name, 240, D120, "%120", "%121", "%122", "%123", "%124", "%125", "%126", SIXTY_FOUR(c, 0),       \
                 SIXTEEN(c, 64), SIXTEEN(c, 80), SIXTEEN(c, 96), EIGHT(c, 112))                                         \
    OF_REGISTERS(type, name, 256, D128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", SIXTY_FOUR(c, 0),       \
                 SIXTY_FOUR(c, 64))                                                                                     \
    OF_SHARED(type, name, 32, D16, "%16", "%17", "%18", SIXTEEN(c, 0))                                                  \
    OF_SHARED(type, name, 48, D24, "%24", "%25", "%26", SIXTEEN(c, 0), EIGHT(c, 16))                                    \
    OF_SHARED(type, name, 64, D32, "%32", "%33", "%34", SIXTEEN(c, 0), SIXTEEN(c, 16))                                  \
    OF_SHARED(type, name, 80, D40, "%40", "%41", "%42", SIXTEEN(c, 0), SIXTEEN(c, 16), EIGHT(c, 32))                    \
    OF_SHARED(type, name, 96, D48, "%48", "%49", "%50", SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32))                  \
    OF_SHARED(type, name, 112, D56, "%56", "%57", "%58", SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), EIGHT(c, 48))   \
    OF_SHARED(type, name, 128, D64, "%64", "%65", "%66", SIXTY_FOUR(c, 0))                                              \
    OF_SHARED(type, name, 256, D128, "%128", "%129", "%130", SIXTY_FOUR(c, 0), SIXTY_FOUR(c, 64))
WGMMA(bf16, "bf16")
WGMMA(f16, "f16")
// c [64, n] = or += a [64, 32] b [n, 32] of e4m3, both in shared memory.
#define OF_E4M3(n, sums, a0, b0, more, ...)                                                                             \
    __device__ inline void wgmma_e4m3(float (&c)[n / 2], unsigned long long a, unsigned long long b, bool add) {         \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, " more ", 0; wgmma.mma_async.sync.aligned.m64n" #n              \
                     "k32.f32.e4m3.e4m3 {" sums "}, " a0 ", " b0 ", add, 1, 1; }"                                        \
                     : __VA_ARGS__                                                                                      \
                     : "l"(a), "l"(b), "r"((int)add));                                                                  \
    }
OF_E4M3(16, D8, "%8", "%9", "%10", EIGHT(c, 0))
OF_E4M3(32, D16, "%16", "%17", "%18", SIXTEEN(c, 0))
OF_E4M3(64, D32, "%32", "%33", "%34", SIXTEEN(c, 0), SIXTEEN(c, 16))
OF_E4M3(96, D48, "%48", "%49", "%50", SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32))
OF_E4M3(128, D64, "%64", "%65", "%66", SIXTY_FOUR(c, 0))
OF_E4M3(192, D96, "%96", "%97", "%98", SIXTY_FOUR(c, 0), SIXTEEN(c, 64), SIXTEEN(c, 80))
#undef OF_E4M3
#undef WGMMA
#undef OF_SHARED
#undef OF_REGISTERS
#endif
