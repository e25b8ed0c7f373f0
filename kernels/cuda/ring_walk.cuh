// A ring of STAGES in shared memory, which one lane has TMA fill with the chunks of a block's tiles, on from one tile
// into the next ones.

#if __CUDA_ARCH__ >= 900
// Initialises a ring, by one thread before the block or its cluster meets: stages that TMA fills, perhaps with other
// lanes, and so many warps release.
__device__ inline void init_ring(Barrier (&full)[STAGES], Barrier (&empty)[STAGES], int warps, int lanes = 0) {
    for (int s = 0; s < STAGES; s++) {
        mbarrier_init(full + s, 1 + lanes);
        mbarrier_init(empty + s, warps);
    }
    fence_mbarrier_init();
}

// Position in the ring: the stage, and the phase of its barriers.
struct PipelineState {
    int stage = 0, phase = 0;

    __device__ inline void advance(int chunks = 1) {
        stage += chunks % STAGES, phase ^= chunks / STAGES & 1;
        if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    }
};

// Asks for the chunks of a block's tiles, of which `first` and `next` begin with the first chunk: STAGES of weights
// before the kernel's predecessor has ended, and the others, and x, after that, each in a stage that has been released.
template <class Walk, class Weights, class Rows>
__device__ inline void fill_ring(Walk& first, Walk& next, Barrier* empty, const Weights& ask, const Rows& ask_x) {
#pragma unroll 1
    for (int n = 0; n < STAGES && first.more(); n++, first.advance()) ask(first);
    grid_wait();
    launch_dependents();
#pragma unroll 1
    for (int n = 0; n < STAGES && next.more(); n++, next.advance()) ask_x(next);
#pragma unroll 1
    for (; next.more(); next.advance()) {
        mbarrier_wait(empty + next.pipe.stage, next.pipe.phase ^ 1);
        ask(next);
        ask_x(next);
    }
}

// Walks chunks 0 to count - 1, of which the n-th goes to stage n % STAGES.
template <class Weights, class Rows>
__device__ __forceinline__ void fill_ring(int count, Barrier* empty, const Weights& ask, const Rows& ask_x) {
#pragma unroll 1
    for (int n = 0; n < STAGES && n < count; n++) ask(n);
    grid_wait();
    launch_dependents();
#pragma unroll 1
    for (int n = 0; n < STAGES && n < count; n++) ask_x(n);
#pragma unroll 1
    for (int n = STAGES; n < count; n++) {
        mbarrier_wait(empty + n % STAGES, n / STAGES - 1);
        ask(n);
        ask_x(n);
    }
}
#endif
