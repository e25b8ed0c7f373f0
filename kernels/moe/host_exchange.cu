// What goes between a step on the GPU and the host while the step runs, through pinned memory that kernels read and write
// themselves: copies and events would each cost a launch. `send` and `collect` alternate in one stream; state [2]: the
// blocks of `send` that are done, and how often it ran, which is what both flags count.

__device__ inline unsigned load_host(const unsigned* from) {
    unsigned y;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(y) : "l"(from) : "memory");
    return y;
}

// x [units of 16 bytes], ids and weights [pairs] to the host; then the flag says so. slots: of each of the router's
// experts, its number among resident ones; numbers [pairs]: of the pairs' experts.
extern "C" __global__ void __launch_bounds__(THREADS)
host_send(const uint4* x, const int* ids, const float* weights, const int* slots, uint4* x_there, int* ids_there,
          float* weights_there, int* numbers, unsigned* state, unsigned* flag, int units, int pairs) {
    grid_wait();
    launch_dependents();
    const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    for (int i = first; i < units; i += step) x_there[i] = x[i];
    for (int p = first; p < pairs; p += step) {
        const int id = ids[p];
        ids_there[p] = id, weights_there[p] = weights[p], numbers[p] = slots[id];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x || atomicAdd(state, 1u) != gridDim.x - 1) return;
    const unsigned count = state[1] + 1;
    state[0] = 0, state[1] = count;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(count) : "memory");
}

// Experts from host memory. list [1 + most], pinned: how many, and which. parts [tensors, 3]: of each tensor its address on
// the host, the bytes of an expert, a multiple of 16, and its address here, where they stand one after the other. count,
// of [most]: the list; numbers [pairs]: the place of each pair's expert; `most` where it is not in the list. first: the
// router's number of expert 0.
extern "C" __global__ void __launch_bounds__(THREADS)
host_fetch(const unsigned* list, const long long* parts, const int* ids, int* count, long long* of, int* numbers,
           int tensors, int pairs, int most, int first) {
    __shared__ int experts[THREADS], told;
    grid_wait();
    launch_dependents();
    if (threadIdx.x == 0) told = (int)load_host(list);  // one thread's, as each load crosses PCIe
    __syncthreads();
    const int found = told;
    if (threadIdx.x < found) experts[threadIdx.x] = (int)load_host(list + 1 + threadIdx.x);
    __syncthreads();
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) *count = found;
        if (threadIdx.x < most) of[threadIdx.x] = threadIdx.x < found ? experts[threadIdx.x] : 0;
        for (int p = threadIdx.x; p < pairs; p += THREADS) {
            int place = most;
            for (int i = 0; i < found; i++)
                if (experts[i] == ids[p] - first) place = i;
            numbers[p] = place;
        }
    }
    constexpr int AHEAD = 4;
    const int step = gridDim.x * THREADS;
    for (int t = 0; t < tensors; t++) {
        const char* from = (const char*)parts[3 * t];
        const long long bytes = parts[3 * t + 1];
        uint4* to = (uint4*)parts[3 * t + 2];
        const int units = (int)(bytes / 16), all = units * found;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < all; i += AHEAD * step) {
            uint4 some[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int at = i + j * step;
                if (at < all) some[j] = stream16(from + experts[at / units] * bytes + at % units * 16ll);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (i + j * step < all) to[i + j * step] = some[j];
        }
    }
}

// y [n] = what resident experts made, and copied ones, where there are any, and the CPU's [n], once the flag says that this
// is there; n is a multiple of 4. The flag behind says that it never will be.
extern "C" __global__ void __launch_bounds__(THREADS)
host_collect(const T* resident, const T* copied, const float* made, T* y, const unsigned* state, const unsigned* flag, int n) {
    grid_wait();
    if (threadIdx.x == 0) {
        const unsigned count = state[1];  // without a limit: a job may be suspended, and the watchdog ends one that hangs
        while (load_host(flag) != count && !load_host(flag + 1)) __nanosleep(100);
    }
    __syncthreads();
    launch_dependents();
    const int i = (blockIdx.x * THREADS + threadIdx.x) * 4;
    if (i >= n) return;
    float sum[4];
    asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
                 : "l"(made + i)
                 : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (RESIDENT) sum[j] += to_float(resident[i + j]);
        if (COPIED) sum[j] += to_float(copied[i + j]);
        y[i + j] = from_float<T>(sum[j]);
    }
}
