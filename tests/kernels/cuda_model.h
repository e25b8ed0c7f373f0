// A GPU's block on a CPU, for tests: each thread is a fiber, and what kernels/cuda/*.cuh do by assembly is written out.
//
// It stands in place of common.cuh, tma.cuh, async_copy.cuh, mma.cuh, wgmma.cuh and half2.cuh. cuda_model.cpp has what is
// the same for all kernels: it is compiled once, where a header's templates would be for each. Warps run in random order.
// A copy poisons its target and lands some time later: what is read or written too early shows. So does what the kernel
// before writes, if it is told: it is there once a block waits for that. Asynchronous GEMMs of tiles take place when they
// are waited for. Blocks of a cluster take turns, each with its own dynamic shared memory. All fibers waiting with no copy
// under way is a deadlock. Memory that may be read is told, the rest is an error.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL

struct uint4 {
    unsigned x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Dim {
    int x, y, z;
};
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

namespace model {
constexpr int SMEM = 228 << 10;
struct Fiber {
    Dim thread;
};
extern Fiber* now;
extern Dim block, grid, threads;
extern unsigned char smem[SMEM];

void fail(const char* what);  // of a thread: it ends there, and so does the launch
void wait_until(std::function<bool()> ready);
unsigned (*together(const unsigned* mine, int n))[8];  // all lanes hand in n words and get everybody's
void meet(int number, int count, bool waits = true);
static int lane() { return now->thread.x % 32; }
static unsigned char* at(unsigned address, int bytes) {
    if (address % bytes || address + bytes > SMEM) fail("an access to shared memory is not aligned, or past its end");
    return smem + address;
}
const unsigned char* at(unsigned address, int bytes, int rank);  // of a block of the cluster, to be read
const char* readable(const void* from, int bytes);
}  // namespace model

#define threadIdx (model::now->thread)
#define blockIdx (model::block)
#define gridDim (model::grid)
#define blockDim (model::threads)

// common.cuh

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
static unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}
static float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static float to_float(float x) { return x; }
static float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
static float to_float(f16 x) {
    const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    const float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                        : exponent     ? ldexpf(1024 + fraction, exponent - 25)
                                       : ldexpf(fraction, -24);
    return x.bits >> 15 ? -value : value;
}
template <class E> static E from_float(float x);
template <> float from_float<float>(float x) { return x; }
template <> bf16 from_float<bf16>(float x) {
    const unsigned bits = __float_as_uint(x);
    if (std::isnan(x)) return {0x7fff};
    return {(uint16_t)(bits + 0x7fff + (bits >> 16 & 1) >> 16)};
}
template <> f16 from_float<f16>(float x) {
    const uint16_t sign = __float_as_uint(x) >> 16 & 0x8000;
    const float size = fabsf(x);
    if (std::isnan(x)) return {0x7fff};
    if (size == 0) return {sign};
    if (size >= 65520) return {(uint16_t)(sign | 0x7c00)};
    int exponent;
    frexpf(size, &exponent);
    if (exponent < -13) exponent = -13;
    const int fraction = (int)nearbyintf(ldexpf(size, 11 - exponent));  // 1024 to 2048, or less of a subnormal one
    return {(uint16_t)(sign | ((exponent + 13) * 1024 + fraction))};
}
static float exp2_approx(float x) { return exp2f(x); }
enum { SILU, GELU, GELU_TANH, RELU2 };
template <class E, int ACT> static float gated(float gate, float up) {
    static_assert(ACT == SILU || ACT == RELU2, "the model has no other activation");
    const float g = to_float(from_float<E>(gate)), u = to_float(from_float<E>(up));
    if (ACT == RELU2) return g > 0 ? g * g * u : 0;
    return g / (1 + expf(-g)) * u;
}
template <class E> static E half_of(unsigned x, int half) { return E{(uint16_t)(x >> 16 * half)}; }
template <class E, int N> struct alignas(sizeof(E) * N) Vec {
    E x[N];
};
template <class E> static float2 unpack(unsigned x) { return {to_float(half_of<E>(x, 0)), to_float(half_of<E>(x, 1))}; }
void grid_wait();
static void launch_dependents() {}
static uint4 stream16(const void* from) {
    uint4 y;
    memcpy(&y, model::readable(from, 16), 16);
    return y;
}
static uint2 stream8(const void* from) {
    uint2 y;
    memcpy(&y, model::readable(from, 8), 8);
    return y;
}
static unsigned stream4(const void* from) {
    unsigned y;
    memcpy(&y, model::readable(from, 4), 4);
    return y;
}
static unsigned smem_address(const void* p) { return (unsigned)((const unsigned char*)p - model::smem); }
static uint4 load_shared16(unsigned from) {
    uint4 y;
    memcpy(&y, model::at(from, 16), 16);
    return y;
}
static uint2 load_shared8(unsigned from) {
    uint2 y;
    memcpy(&y, model::at(from, 8), 8);
    return y;
}
static unsigned load_shared4(unsigned from) {
    unsigned y;
    memcpy(&y, model::at(from, 4), 4);
    return y;
}
template <int THREADS> static void block_sync(int number) { model::meet(number, THREADS); }
template <int THREADS> static void block_arrive(int number) { model::meet(number, THREADS, false); }
static void __syncthreads() { model::meet(0, model::threads.x); }
static void __syncwarp() {
    unsigned none = 0;
    model::together(&none, 1);
}
template <class E> static E __shfl_sync(unsigned, E x, int lane) {  // of four bytes
    unsigned mine;
    memcpy(&mine, &x, 4);
    memcpy(&x, model::together(&mine, 1)[lane], 4);
    return x;
}
template <class E> static E __shfl_xor_sync(unsigned, E x, int step) { return __shfl_sync(0, x, model::lane() ^ step); }
template <class E> static E __shfl_up_sync(unsigned, E x, int step) {
    return __shfl_sync(0, x, model::lane() < step ? model::lane() : model::lane() - step);
}
static unsigned __match_any_sync(unsigned, int x) {
    const unsigned mine = x;
    auto all = model::together(&mine, 1);
    unsigned same = 0;
    for (int lane = 0; lane < 32; lane++) same |= (unsigned)(all[lane][0] == mine) << lane;
    return same;
}
static unsigned __ballot_sync(unsigned, bool x) {
    const unsigned mine = x;
    auto all = model::together(&mine, 1);
    unsigned set = 0;
    for (int lane = 0; lane < 32; lane++) set |= all[lane][0] << lane;
    return set;
}
static bool __any_sync(unsigned, bool x) { return __ballot_sync(0, x); }
static int __reduce_add_sync(unsigned, int x) {
    const unsigned mine = x;
    auto all = model::together(&mine, 1);
    int sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += all[lane][0];
    return sum;
}
static float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0, x, step);
    return x;
}
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
template <class E> static E __ldcg(const E* x) { return *x; }
static void prefetch_line(const void*) {}
static int load_if(const int* from, bool there) { return there ? *from : 0; }
static int counted(const int* count) { return *count; }
static int atomicAdd(int* x, int y) { return (*x += y) - y; }
static int add_one(int* x) { return atomicAdd(x, 1); }
static void __threadfence() {}
void wait_for_count(const int* count, int least);
static bool wait_briefly_for_count(const int* count, int least, int) { return *count >= least; }  // blocks take turns
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; i++) y |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return y;
}

#include "cuda_model_mma.h"

// tma.cuh

struct Barrier {
    int arrivals, pending, bytes, phase;
};
struct TensorMap {
    const char* start;
    int rows, columns, height;
    int runs, run;  // of a box, if there are several side by side, and their elements
};
static void mbarrier_init(Barrier* barrier, int arrivals) { *barrier = {arrivals, arrivals, 0, 0}; }
static void fence_mbarrier_init() {}
static void prefetch_tensor_map(const TensorMap*) {}
static void fence_async_proxy() {}
void mbarrier_arrive(Barrier* barrier);
void mbarrier_expect(Barrier* barrier, int bytes);
void mbarrier_wait(Barrier* barrier, int round);
static bool elected() { return model::lane() == 0; }
static void mbarrier_arrive_if(bool arrives, Barrier* barrier) {
    if (arrives) mbarrier_arrive(barrier);
}
static void release_stage(Barrier* empty) {
    __syncwarp();
    if (model::lane() == 0) mbarrier_arrive(empty);
}
void bulk_load(unsigned to, const void* from, int bytes, Barrier* barrier);
void tma_load(unsigned to, const TensorMap* map, int input, int row, Barrier* barrier);
void tma_load_runs(unsigned to, const TensorMap* map, int run, int row, Barrier* barrier);
static void zero_smem(unsigned at) { memset(model::at(at, 16), 0, 16); }

#include "cuda_model_copies.h"
#include "cuda_model_wgmma.h"
