// Exchange between a step on the GPU and the host while the step runs, through pinned memory that kernels read and
// write themselves: copies and events would each cost a launch. `send`, `fetch` and `collect` follow each other in one
// stream; state [5]: the blocks of `send` that are done, and how often it ran, which is what flags count; up to which
// count the list and the CPU's sums were seen; and the list's entry for `collect_only`. One thread of a grid looks at
// the host's flags and tells the others there: loads of one address of host memory cross PCIe one after the other.

__device__ inline unsigned load_host(const unsigned* from) {
    unsigned y;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(y) : "l"(from) : "memory");
    return y;
}

__device__ inline unsigned load_volatile(const unsigned* from) {
    unsigned y;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(y) : "l"(from) : "memory");
    return y;
}
__device__ inline void store_flag(unsigned* to, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Looks at a count of the host until it has come to `want`; it may be further. Where `given_up` shows that it will not,
// this ends too, and shows it itself after LIMIT_S seconds.
__device__ inline unsigned await_host(const unsigned* flag, unsigned want, unsigned* given_up) {
    constexpr unsigned HOST_IS_LATE = 2;  // as in host_service.py
    const unsigned long long begin = nanoseconds();
    unsigned word;
    while ((int)((word = load_host(flag)) - want) < 0 && !load_host(given_up)) {
        __nanosleep(100);
        if (nanoseconds() - begin > LIMIT_S * 1000000000ull)
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(given_up), "r"(HOST_IS_LATE) : "memory");
    }
    return word;
}

// A tensor of experts in host memory, or where copied ones are, and as buffers or slots have it.
struct Part {
    const char* there;
    long long bytes;  // of an expert there, a multiple of 16, below 2 GB where it is repacked
    char* here;
    long long here_bytes;
    const uint4* permutation;  // of nibble_permutation.py, for four bytes each; null: bytes stay as they are
    const unsigned* flips;     // of four bytes
    long long unit, made;      // bytes of a unit there, at most UNIT, and here: multiples of 16
};

// x [units of 16 bytes], ids and weights [routed] to the host; then the flag shows it. slots: of each of the router's
// experts, its number among resident ones; numbers [routed]: of the routed tokens' experts.
extern "C" __global__ void __launch_bounds__(THREADS)
host_send(const uint4* x, const int* ids, const float* weights, const int* slots, uint4* x_there, int* ids_there,
          float* weights_there, int* numbers, unsigned* state, unsigned* flag, int units, int routed) {
    grid_wait();
    launch_dependents();
    const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    for (int i = first; i < units; i += step) x_there[i] = x[i];
    for (int p = first; p < routed; p += step) {
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

// Experts from host memory. list [1 + most], pinned: a word of 23 bits of the count of `send` and 9 of how many, which
// this awaits; and of each its number, with its slot + 1 in the upper 16 bits where it becomes resident. parts
// [tensors, 3]: of each tensor its address on the host, the bytes of an expert, a multiple of 16, and its address here,
// where they stand one after the other. count, of and slots [most]: the list; numbers [routed]: the place of each
// routed token's expert; `most` where it is not in the list. first: the router's number of expert 0. given_up: no list
// will come.
extern "C" __global__ void __launch_bounds__(THREADS)
host_fetch(const unsigned* list, unsigned* state, unsigned* given_up, const Part* parts, const int* ids,
           int* count, long long* of, int* slots, int* numbers, int tensors, int routed, int most, int first) {
    __shared__ int experts[THREADS], listed;
    grid_wait();
    const unsigned mine = state[1];
    if (blockIdx.x) {
        if (threadIdx.x == 0) {
            while (load_volatile(state + 2) != mine) __nanosleep(50);
            listed = *(volatile int*)count;
        }
        __syncthreads();
        if (threadIdx.x < listed) experts[threadIdx.x] = (int)((volatile long long*)of)[threadIdx.x];
    } else {
        if (threadIdx.x == 0) {
            const unsigned word = await_host(list, mine << 9, given_up);
            listed = (word ^ mine << 9) > 511 ? 0 : (int)(word & 511), *count = listed;
        }
        __syncthreads();
        const unsigned entry = threadIdx.x < listed ? load_host(list + 1 + threadIdx.x) : 0;
        experts[threadIdx.x] = (int)(entry & 0xffff);
        if (threadIdx.x < most) of[threadIdx.x] = experts[threadIdx.x], slots[threadIdx.x] = (int)(entry >> 16) - 1;
        __syncthreads();
        if (threadIdx.x == 0) store_flag(state + 2, mine);
        for (int p = threadIdx.x; p < routed; p += THREADS) {
            int place = most;
            for (int i = 0; i < listed; i++)
                if (experts[i] == ids[p] - first) place = i;
            numbers[p] = place;
        }
    }
    __syncthreads();
    constexpr int AHEAD = 4;
    const int step = gridDim.x * THREADS, begin = blockIdx.x * THREADS + threadIdx.x;
    for (int t = 0; t < tensors; t++) {
        const long long bytes = parts[t].bytes;
        const int units = (int)(bytes / 16);
        for (int e = 0; e < listed; e++) {
            const char* const from = parts[t].there + experts[e] * bytes;
            uint4* const to = (uint4*)(parts[t].here + e * bytes);
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
    // expert_mlp.cu may load some of these weights by TMA before its grid_wait(). All blocks of this kernel have ended
    // by then, but only grid_wait() would make their stores visible without these fences.
    if (listed) fence_tma_reads(), __threadfence();
}

// Copied experts that become resident, and what tells where they are: for the next step's `send`, and nothing before
// that reads these slots. parts [tensors, 3]: of each tensor where the copied ones are, the bytes of an expert, a
// multiple of 16, and where the slots are. table [experts of the router]: the slot of each, or `none`. expert_in: of
// each slot.
struct Adopted {
    const int *count, *slots;
    const long long* of;
    const Part* parts;
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
            const long long bytes = a.parts[t].bytes;
            const uint4* const from = (const uint4*)(a.parts[t].there + i * bytes);
            uint4* const to = (uint4*)(a.parts[t].here + slot * bytes);
            for (int j = begin; j < (int)(bytes / 16); j += step) to[j] = from[j];
        }
        fence_tma_reads();  // as in host_fetch
        if (begin) continue;
        a.table[a.first + a.expert_in[slot]] = a.none;
        a.table[a.first + a.of[i]] = slot;
        a.expert_in[slot] = a.of[i];
    }
}

// The CPU's sums: of this layer, where OWN, and of the one before, where OWED. Four of either.
struct Made {
    const float *own, *owed;

    static __device__ inline void add(const float* from, float (&sum)[4]) {
        float some[4];
        asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(some[0]), "=f"(some[1]), "=f"(some[2]), "=f"(some[3])
                     : "l"(from)
                     : "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += some[j];
    }
    // Up to which count of layers the CPU has to be.
    static __device__ inline unsigned awaited(unsigned mine) { return OWN ? mine : mine - 1; }
};

// Four of y.
__device__ inline void add_up(const T* resident, const T* copied, const Made& made, T* y, int n) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * 4;
    if (i >= n) return;
    float sum[4] = {};
    if constexpr (OWN) Made::add(made.own + i, sum);
    if constexpr (OWED) Made::add(made.owed + i, sum);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (RESIDENT) sum[j] += to_float(resident[i + j]);
        if (COPIED) sum[j] += to_float(copied[i + j]);
        y[i + j] = from_float<T>(sum[j]);
    }
}

// y [n] = what resident experts made, and copied ones, where there are any, and the CPU's [n], once the flag shows that
// this is there; n is a multiple of 4. The flag behind shows that it never will be. Blocks behind those of y adopt.
// own: what the CPU makes of this layer, owed: of the layer before. late: the count of the latest layer at which sums
// were there already.
extern "C" __global__ void __launch_bounds__(THREADS)
host_collect(const T* resident, const T* copied, const float* own, const float* owed, T* y, unsigned* state,
             unsigned* flag, unsigned* late, int n, const int* count, const int* slots, const long long* of,
             const Part* parts, int* table, long long* expert_in, int tensors, int first, int none) {
    grid_wait();
    const int blocks = (n + 4 * THREADS - 1) / (4 * THREADS);
    if (blockIdx.x >= blocks) {
        adopt({count, slots, of, parts, table, expert_in, tensors, first, none}, blockIdx.x - blocks, gridDim.x - blocks);
        return;
    }
    if (threadIdx.x == 0) {
        const unsigned mine = state[1];
        if (blockIdx.x) {
            while (load_volatile(state + 3) != mine) __nanosleep(50);
        } else {
            const unsigned want = Made::awaited(mine);
            if (COPIED && (OWN || OWED) && (int)(load_host(flag) - want) >= 0)
                asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(late), "r"(mine) : "memory");
            await_host(flag, want, flag + 1);
            store_flag(state + 3, mine);
        }
    }
    __syncthreads();
    launch_dependents();
    add_up(resident, copied, {own, owed}, y, n);
}

// Two nibbles of a unit, as nibble_permutation.py has them in its tables.
__device__ inline unsigned moved(const unsigned char* unit, unsigned both) {
    const unsigned low = both & 0xffff, high = both >> 16;
    return (unit[low >> 1] >> low % 2 * 4 & 15) | (unit[high >> 1] >> high % 2 * 4 & 15) << 4;
}

// An expert from host memory to its slot, repacked on the way.
__device__ inline void bring(const Part* parts, int tensors, int expert, int slot, int block, int blocks) {
    __shared__ uint4 some[UNIT / 16];
    for (int t = 0; t < tensors; t++) {
        const Part a = parts[t];
        const char* from = a.there + expert * a.bytes;
        char* to = a.here + slot * a.here_bytes;
        if (!a.permutation) {
            for (int i = block * THREADS + threadIdx.x; i < a.bytes / 16; i += blocks * THREADS)
                ((uint4*)to)[i] = stream16(from + i * 16ll);
            continue;
        }
        const int units = (int)a.bytes / (int)a.unit, loads = (int)a.unit / 16, stores = (int)a.made / 4;
        const int each = UNIT / (int)a.unit;  // units at once
        for (int u = block * each; u < units; u += blocks * each) {
            const int count = min(each, units - u);
            for (int i = threadIdx.x; i < count * loads; i += THREADS) some[i] = stream16(from + u * a.unit + i * 16ll);
            __syncthreads();
            for (int i = threadIdx.x; i < count * stores; i += THREADS) {
                const unsigned char* const unit = (const unsigned char*)some + i / stores * (int)a.unit;
                const uint4 m = a.permutation[i % stores];
                const unsigned four = moved(unit, m.x) | moved(unit, m.y) << 8 | moved(unit, m.z) << 16 |
                                      moved(unit, m.w) << 24;
                ((unsigned*)(to + u * a.made))[i] = four ^ a.flips[i % stores];
            }
            __syncthreads();
        }
    }
}

// `collect` where the CPU computes all experts that are missing, and no other kernel looks at the list. One at most is
// in it, which becomes resident, as with `adopt`: blocks behind those of y bring it while the CPU computes.
extern "C" __global__ void __launch_bounds__(THREADS)
host_collect_only(const T* resident, const float* own, const float* owed, T* y, unsigned* state, unsigned* flag,
                  const unsigned* list, int n, const Part* parts, int* table, long long* expert_in, int tensors,
                  int first, int none) {
    __shared__ unsigned entry;
    grid_wait();
    const int blocks = (n + 4 * THREADS - 1) / (4 * THREADS);
    const unsigned mine = state[1];
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            await_host(flag, Made::awaited(mine), flag + 1);
            store_flag(state + 3, mine);
        }
        if (threadIdx.x == 32) {  // of another warp, so that the list is seen before the sums are there
            const unsigned word = await_host(list, mine << 9, flag + 1);
            state[4] = word != (mine << 9 | 1) ? 0 : load_host(list + 1);
            store_flag(state + 2, mine);
        }
    } else if (threadIdx.x == 0) {
        const unsigned* const ready = state + (blockIdx.x < blocks ? 3 : 2);
        while (load_volatile(ready) != mine) __nanosleep(50);
        entry = *(volatile unsigned*)(state + 4);
    }
    __syncthreads();
    if (blockIdx.x < blocks) {
        launch_dependents();
        add_up(resident, resident, {own, owed}, y, n);
        return;
    }
    if (!entry) return;
    const int expert = entry & 0xffff, slot = (int)(entry >> 16) - 1;
    bring(parts, tensors, expert, slot, blockIdx.x - blocks, gridDim.x - blocks);
    if (blockIdx.x != blocks || threadIdx.x) return;
    table[first + expert_in[slot]] = none;
    table[first + expert] = slot;
    expert_in[slot] = expert;
}
