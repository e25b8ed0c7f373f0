// What goes between a step on the GPU and the host while the step runs, through pinned memory that kernels read and write
// themselves: copies and events would each cost a launch. `send`, `fetch` and `collect` follow each other in one stream;
// state [4]: the blocks of `send` that are done, and how often it ran, which is what flags count; and up to which count the
// list and the CPU's sums were seen. One thread of a grid looks at the host's flags and tells the others there: loads of
// one address of host memory cross PCIe one after the other.

__device__ inline unsigned load_host(const unsigned* from) {
    unsigned y;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(y) : "l"(from) : "memory");
    return y;
}

__device__ inline unsigned long long nanoseconds() {
    unsigned long long y;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(y));
    return y;
}

__device__ inline unsigned load_told(const unsigned* from) {
    unsigned y;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(y) : "l"(from) : "memory");
    return y;
}
__device__ inline void tell(unsigned* to, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Looks at a flag of the host until it is `want`, but for what `loose` covers. Where `given_up` says that it will not be,
// this ends too, and says so itself after LIMIT_S seconds.
__device__ inline unsigned await_host(const unsigned* flag, unsigned want, unsigned loose, unsigned* given_up) {
    constexpr unsigned HOST_IS_LATE = 2;  // as in host_service.py
    const unsigned long long begin = nanoseconds();
    unsigned word;
    while (((word = load_host(flag)) ^ want) > loose && !load_host(given_up)) {
        __nanosleep(100);
        if (nanoseconds() - begin > LIMIT_S * 1000000000ull)
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(given_up), "r"(HOST_IS_LATE) : "memory");
    }
    return word;
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

// Experts from host memory. list [1 + most], pinned: a word of 23 bits of the count of `send` and 9 of how many, which this
// awaits; and of each its number, with its slot + 1 in the upper 16 bits where it becomes resident. parts [tensors, 3]: of
// each tensor its address on the host, the bytes of an expert, a multiple of 16, and its address here, where they stand one
// after the other. count, of and slots [most]: the list; numbers [pairs]: the place of each pair's expert; `most` where it
// is not in the list. first: the router's number of expert 0. given_up: no list will come.
extern "C" __global__ void __launch_bounds__(THREADS)
host_fetch(const unsigned* list, unsigned* state, unsigned* given_up, const long long* parts, const int* ids,
           int* count, long long* of, int* slots, int* numbers, int tensors, int pairs, int most, int first) {
    __shared__ int experts[THREADS], told;
    grid_wait();
    const unsigned mine = state[1];
    if (blockIdx.x) {
        if (threadIdx.x == 0) {
            while (load_told(state + 2) != mine) __nanosleep(50);
            told = *(volatile int*)count;
        }
        __syncthreads();
        if (threadIdx.x < told) experts[threadIdx.x] = (int)((volatile long long*)of)[threadIdx.x];
    } else {
        if (threadIdx.x == 0) {
            const unsigned word = await_host(list, mine << 9, 511, given_up);
            told = (word ^ mine << 9) > 511 ? 0 : (int)(word & 511), *count = told;
        }
        __syncthreads();
        const unsigned entry = threadIdx.x < told ? load_host(list + 1 + threadIdx.x) : 0;
        experts[threadIdx.x] = (int)(entry & 0xffff);
        if (threadIdx.x < most) of[threadIdx.x] = experts[threadIdx.x], slots[threadIdx.x] = (int)(entry >> 16) - 1;
        __syncthreads();
        if (threadIdx.x == 0) tell(state + 2, mine);
        for (int p = threadIdx.x; p < pairs; p += THREADS) {
            int place = most;
            for (int i = 0; i < told; i++)
                if (experts[i] == ids[p] - first) place = i;
            numbers[p] = place;
        }
    }
    __syncthreads();
    constexpr int AHEAD = 4;
    const int step = gridDim.x * THREADS, begin = blockIdx.x * THREADS + threadIdx.x;
    for (int t = 0; t < tensors; t++) {
        const long long bytes = parts[3 * t + 1];
        const int units = (int)(bytes / 16);
        for (int e = 0; e < told; e++) {
            const char* const from = (const char*)parts[3 * t] + experts[e] * bytes;
            uint4* const to = (uint4*)(parts[3 * t + 2] + e * bytes);
            for (int i = begin; i < units; i += AHEAD * step) {
                uint4 some[AHEAD];
#pragma unroll
                for (int j = 0; j < AHEAD; j++)
                    if (i + j * step < units) some[j] = stream16(from + (i + j * step) * 16ll);
#pragma unroll
                for (int j = 0; j < AHEAD; j++)
                    if (i + j * step < units) to[i + j * step] = some[j];
            }
        }
    }
    // What multiplies by these weights may ask for some before it waits (expert_mlp.cu): all blocks have ended then, but
    // only who waits is told that their memory is written.
    if (told) __threadfence();
}

// Copied experts that become resident, and what says where they are: for the next step's `send`, and nothing before that
// reads these slots. parts [tensors, 3]: of each tensor where the copied ones are, the bytes of an expert, a multiple of
// 16, and where the slots are. table [experts of the router]: the slot of each, or `none`. expert_in: of each slot.
struct Adopted {
    const int *count, *slots;
    const long long *of, *parts;
    int* table;
    long long* expert_in;
    int tensors, first, none;
};

__device__ inline void adopt(const Adopted& a, int block, int blocks) {
    const int count = *a.count, step = blocks * THREADS, begin = block * THREADS + threadIdx.x;
    for (int i = 0; i < count; i++) {
        const int slot = a.slots[i];
        if (slot < 0) continue;
        for (int t = 0; t < a.tensors; t++) {
            const long long bytes = a.parts[3 * t + 1];
            const uint4* const from = (const uint4*)(a.parts[3 * t] + i * bytes);
            uint4* const to = (uint4*)(a.parts[3 * t + 2] + slot * bytes);
            for (int j = begin; j < (int)(bytes / 16); j += step) to[j] = from[j];
        }
        if (begin) continue;
        a.table[a.first + a.expert_in[slot]] = a.none;
        a.table[a.first + a.of[i]] = slot;
        a.expert_in[slot] = a.of[i];
    }
}

// y [n] = what resident experts made, and copied ones, where there are any, and the CPU's [n], once the flag says that this
// is there; n is a multiple of 4. The flag behind says that it never will be. Blocks behind those of y adopt.
extern "C" __global__ void __launch_bounds__(THREADS)
host_collect(const T* resident, const T* copied, const float* made, T* y, unsigned* state, unsigned* flag, int n,
             const int* count, const int* slots, const long long* of, const long long* parts, int* table,
             long long* expert_in, int tensors, int first, int none) {
    grid_wait();
    const int blocks = (n + 4 * THREADS - 1) / (4 * THREADS);
    if (blockIdx.x >= blocks) {
        adopt({count, slots, of, parts, table, expert_in, tensors, first, none}, blockIdx.x - blocks, gridDim.x - blocks);
        return;
    }
    if (threadIdx.x == 0) {
        const unsigned mine = state[1];
        if (blockIdx.x) {
            while (load_told(state + 3) != mine) __nanosleep(50);
        } else {
            await_host(flag, mine, 0, flag + 1);
            tell(state + 3, mine);
        }
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
