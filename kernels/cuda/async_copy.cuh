// Copies to shared memory that a thread asks for and that come by themselves, from sm_80 on.

#if __CUDA_ARCH__ >= 800
// 16 bytes past the first-level cache, or zeros.
__device__ inline void copy_async16(unsigned to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Commits this thread's copies since the last group as one group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of this thread's groups, the youngest ones, are under way.
template <int GROUPS> __device__ inline void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// So many bytes are brought to the second-level cache, from sm_90 on: a multiple of 16, from a multiple of it on.
__device__ inline void prefetch_bulk(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
#endif
