// TMA, the tensor memory accelerator of sm_90 and later: boxes of a matrix come to shared memory, and mbarriers there tell
// that they have.

#include "async_copy.cuh"

struct alignas(64) TensorMap {  // CUtensorMap
    char opaque[128];
};
typedef unsigned long long Barrier;

#if __CUDA_ARCH__ >= 900
__device__ inline void mbarrier_init(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Whether this is the one lane, of a whole warp, that asks TMA for copies. ptxas knows that it is one: after any other
// test it puts a loop over the lanes around each copy (SASS of CUDA 13), and a copy takes some 80 cycles more to ask for
// (H200, 2026-11-25; docs/kernels.md has the command and the times).
__device__ inline bool elected() {
    unsigned y;
    asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.b32 %0, 1, 0, one; }" : "=r"(y));
    return y;
}

// Orders this thread's reads and writes of shared memory before those of TMA and asynchronous matmuls.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// After the last mbarrier_init(), before the barriers are used.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
}

// The one arrival at a barrier that awaits so many bytes by TMA.
__device__ inline void mbarrier_expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes) : "memory");
}

__device__ inline void mbarrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ inline void mbarrier_wait(Barrier* barrier, int round) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
        ::"r"(smem_address(barrier)), "r"(round & 1) : "memory");
}

// Prefetches a map, so that the first copy does not wait for it. Maps are arguments: no grid_wait() is
// needed.
__device__ inline void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box of `map` that begins with these inputs and rows.
__device__ inline void tma_load(unsigned to, const TensorMap* map, int input, int row, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(input), "r"(row), "r"(smem_address(barrier))
                 : "memory");
}

// The box of a map that counts runs of 64 inputs: of these runs and rows.
__device__ inline void tma_load_runs(unsigned to, const TensorMap* map, int run, int row, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(0), "r"(run), "r"(row), "r"(smem_address(barrier))
                 : "memory");
}

// So many bytes as they lie, a multiple of 16, from where and to where are multiples of it.
__device__ inline void bulk_load(unsigned to, const void* from, int bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

// This block's place in its cluster.
__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// At another block's barrier, without a branch: around one, ptxas would have asynchronous matmuls wait for each other.
__device__ inline void mbarrier_arrive_at_if(bool arrives, Barrier* barrier, int rank) {
    asm volatile(
        "{ .reg .pred arrives; .reg .b32 there; setp.ne.b32 arrives, %2, 0; mapa.shared::cluster.u32 there, %0, %1; "
        "@arrives mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(smem_address(barrier)),
        "r"(rank), "r"((int)arrives)
        : "memory");
}

__device__ inline void mbarrier_arrive_if(bool arrives, Barrier* barrier) {
    asm volatile(
        "{ .reg .pred arrives; setp.ne.b32 arrives, %1, 0; @arrives mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(
            smem_address(barrier)),
        "r"((int)arrives)
        : "memory");
}

// 16 bytes of the shared memory of one of the cluster's blocks, from the address that they have in this one's.
__device__ inline float4 load_from_block(unsigned at, int rank) {
    unsigned there;
    float4 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(there)
                 : "memory");
    return x;
}

// The box to the blocks of a cluster whose bits are set, to the same place; each one's barrier awaits its own.
__device__ inline void tma_load_multicast(unsigned to, const TensorMap* map, int input, int row, Barrier* barrier,
                                          int blocks = 3) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(to),
        "l"(map), "r"(input), "r"(row), "r"(smem_address(barrier)), "h"((unsigned short)blocks)
        : "memory");
}

// So many bytes as they lie, likewise.
__device__ inline void bulk_load_multicast(unsigned to, const void* from, int bytes, Barrier* barrier, int blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(smem_address(barrier)), "h"((unsigned short)blocks)
                 : "memory");
}

// This thread's arrival at a barrier, once all that it has copied without TMA is there. The barrier counts it from the
// start.
__device__ inline void arrive_when_copied(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// 16 bytes of shared memory.
__device__ inline void zero_smem(unsigned at) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

// A warp has read its part of a stage: what its loads still have on its way is read before TMA writes there
// again. The arrival alone does not wait for them, and TMA is another proxy.
__device__ inline void release_stage(Barrier* empty) {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}
#endif
