// Barriers of the SIZE ranks of a group whose GPUs map each other's memory; tests/kernels/collective/barrier_model.py
// runs them step by step.
//
// Each rank has a region that the others have mapped: two slots for what it contributes, its signals, two LL buffers
// (allreduce_norm.cu), a receive buffer for GEMMs (kernels/gemm/gemm_reduce_scatter.py). A call lays its input out in
// one slot and the next call in the other, so that one barrier a call is enough: whoever has passed the barrier of call
// n + 1 knows that every other rank has begun call n + 1, so that its call n, the last reader of the slot that call n +
// 2 writes, has ended. For this the calls of a rank must follow each other on its stream, none of the kernels between
// them may end before its predecessor has (some block of each passes grid_wait()), and all ranks must make the same
// calls with the same grids.
//
// Block i waits for block i of the other ranks and reads only what these have laid out. Its flags count barriers, two to a
// call; another rank may be at its next call before this one has looked, and so up to three further. The count is kept
// here, not by the host, so that calls may be replayed in a CUDA graph, and each block keeps one of its own; blocks
// that a call leaves out are counted on by the others, so that all agree on the slot.
//
// All blocks of a grid have to be on the GPU at the same time. No call has more than BLOCKS, nor more of many threads
// than SymmetricMemory.blocks of kernels/collective/allreduce.py, which every rank's GPU holds.

struct Signals {
    unsigned count[BLOCKS];          // barriers up to the last call, for this rank alone
    unsigned arrived[BLOCKS][SIZE];  // the barrier at which block i of rank j has arrived; written by rank j
};

typedef unsigned long long Table;  // the addresses of all ranks' regions, as this rank has mapped them, in rank order

struct Call {
    char* slots[SIZE];  // this call's, of all ranks; indexed by constants alone, so that they stay in registers
    char* mine;         // slots[rank]
    Signals* signals;   // this rank's
    unsigned before;    // the count of barriers before this call
    // Flags by which this thread, if it is among the last SIZE, tells another rank that this one has arrived, and looks for
    // that. The last ones have least to do where a block's work is not a multiple of its threads.
    unsigned *there, *here;
};

__device__ inline int peer() { return THREADS - 1 - (int)threadIdx.x; }

__device__ inline Signals* signals(Table region) { return (Signals*)(region + 2ll * SLOT); }

// The LL buffer of allreduce_norm.cu for the call that `before` barriers precede.
__device__ inline char* ll_buffer(Table region, unsigned before) {
    return (char*)(region + 2ll * SLOT + sizeof(Signals) + before / 2 % 2 * ((long long)INBOX + SENT));
}

// The table is asked for before the kernel's predecessor has ended, the count that the last call wrote after that.
__device__ inline Call begin_call(const Table* table, int rank) {
    Call call;
    call.mine = (char*)table[rank];
    call.signals = signals(table[rank]);
    if (peer() < SIZE) {
        call.there = &signals(table[peer()])->arrived[blockIdx.x][rank];
        call.here = &call.signals->arrived[blockIdx.x][peer()];
    }
#pragma unroll
    for (int r = 0; r < SIZE; r++) call.slots[r] = (char*)table[r];
    launch_dependents();
    grid_wait();
    call.before = call.signals->count[blockIdx.x];
    long long offset = call.before / 2 % 2 * (long long)SLOT;
    call.mine += offset;
#pragma unroll
    for (int r = 0; r < SIZE; r++) call.slots[r] += offset;
    return call;
}

// Publishes what this thread has written or seen to those who await this. `step`: 1 or 2.
__device__ inline void signal(const Call& call, int step) {
    if (peer() < SIZE)
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(call.there), "r"(call.before + step) : "memory");
}

__device__ inline void wait_for_signal(const Call& call, int step) {
    if (peer() < SIZE) {
        unsigned now = call.before + step, seen;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(call.here) : "memory");
        while (seen - now > 3);
    }
}

// Makes the block's writes visible to the other ranks' blocks after their own barrier.
__device__ inline void barrier(const Call& call, int step) {
    __syncthreads();
    signal(call, step);
    wait_for_signal(call, step);
    __syncthreads();
}

// After the last barrier and a __syncthreads(), which all threads' look at the count precedes.
__device__ inline void end_call(const Call& call) {
    for (int i = blockIdx.x + threadIdx.x * gridDim.x; i < BLOCKS; i += gridDim.x * THREADS)
        call.signals->count[i] = call.before + 2;
}

typedef Vec<T, V> Vector;
constexpr int AHEAD = SIZE > 4 ? 1 : 2;  // vectors of all ranks that a thread has registers for

struct Parts {
    Vector of[SIZE];  // one of each rank
};

// Vector `at` of all ranks' slots.
__device__ inline Parts parts(const Call& call, int at) {
    Parts found;
#pragma unroll
    for (int r = 0; r < SIZE; r++) found.of[r] = ((const Vector*)call.slots[r])[at];
    return found;
}

// In rank order, so that the sum has the same bits everywhere.
__device__ inline Vector total(const Parts& parts) {
    Vector y;
#pragma unroll
    for (int j = 0; j < V; j++) {
        float sum = to_float(parts.of[0].x[j]);
#pragma unroll
        for (int r = 1; r < SIZE; r++) sum += to_float(parts.of[r].x[j]);
        y.x[j] = from_float<T>(sum);
    }
    return y;
}

// store(i, load(i)) for i = first, first + stride, ... below count: MOST loads at a time are under way before the first
// store, which the compiler could not see for itself to leave the later loads alone. Another GPU answers after 1 to 2
// us.
template <int MOST, class L, class S> __device__ inline void strided(int first, int count, int stride, L load, S store) {
    for (int i = first; i < count; i += MOST * stride) {
        decltype(load(0)) held[MOST];
#pragma unroll
        for (int j = 0; j < MOST; j++)
            if (i + j * stride < count) held[j] = load(i + j * stride);
#pragma unroll
        for (int j = 0; j < MOST; j++)
            if (i + j * stride < count) store(i + j * stride, held[j]);
    }
}
