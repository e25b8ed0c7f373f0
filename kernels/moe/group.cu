// Sorts routed tokens by expert, and cuts each expert's routed tokens into tiles of ROWS. `group` does it in one block.
// Of many routed tokens each block has a part, PART of them: `count_parts` counts the routed tokens of each part, and
// `group_parts` sorts them.
//
// ids [routed] → sorted_ids [routed]: routed tokens, expert by expert; offsets [EXPERTS + 1]: where each expert's begin;
// tile_expert and tile_start [tiles]: a tile's expert and its first place in `sorted_ids`. Tiles that are not needed
// have expert -1. Routed tokens of one expert come in any order: every one of them is computed for itself. Of more
// experts than EXPERTS, those from `first` on are sorted; routed tokens of the others are in no tile.

struct Experts {  // in shared memory
    int counts[EXPERTS], starts[EXPERTS], first_tile[EXPERTS];
    int before[EXPERTS];  // routed tokens of the parts before this block's
    int tiles;
};

// use(p, e) of each of the routed tokens from..to that are sorted; e counts from the first expert.
template <class Use> __device__ inline void each_routed(const int* ids, int from, int to, int first, Use use) {
#pragma unroll 8
    for (int p = from + threadIdx.x; p < to; p += THREADS) {
        const int e = ids[p] - first;
        if ((unsigned)e < EXPERTS) use(p, e);
    }
}

// all.counts and all.before are there. Writes the order of the routed tokens from..to; the first block also writes what
// holds for all.
__device__ inline void sort(Experts& all, const int* ids, int from, int to, int* sorted_ids, int* offsets, int* tile_expert,
                            int* tile_start, int tiles, int first) {
    const bool writes_tiles = blockIdx.x == 0;
    if (threadIdx.x < 32) {  // running sums of routed tokens and of tiles, over 32 experts at a time
        const int lane = threadIdx.x;
        int start = 0, tile = 0;
        for (int e = lane; e - lane < EXPERTS; e += 32) {
            const int n = e < EXPERTS ? all.counts[e] : 0, mine = (n + ROWS - 1) / ROWS;
            int sum = n, tile_sum = mine;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int a = __shfl_up_sync(0xffffffffu, sum, step), b = __shfl_up_sync(0xffffffffu, tile_sum, step);
                if (lane >= step) sum += a, tile_sum += b;
            }
            if (e < EXPERTS) all.starts[e] = start + sum - n, all.first_tile[e] = tile + tile_sum - mine;
            if (e < EXPERTS && writes_tiles) offsets[e] = all.starts[e];
            start += __shfl_sync(0xffffffffu, sum, 31), tile += __shfl_sync(0xffffffffu, tile_sum, 31);
        }
        if (lane == 0) all.tiles = tile;
        if (lane == 0 && writes_tiles) offsets[EXPERTS] = start;
    }
    __syncthreads();
    for (int e = threadIdx.x; writes_tiles && e < EXPERTS; e += THREADS)
        for (int i = 0; i * ROWS < all.counts[e]; i++)
            tile_expert[all.first_tile[e] + i] = e, tile_start[all.first_tile[e] + i] = all.starts[e] + i * ROWS;
    for (int i = all.tiles + threadIdx.x; writes_tiles && i < tiles; i += THREADS) tile_expert[i] = -1;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) all.before[e] += all.starts[e];
    __syncthreads();
    each_routed(ids, from, to, first, [&](int p, int e) { sorted_ids[atomicAdd(all.before + e, 1)] = p; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
group(const int* ids, int* sorted_ids, int* offsets, int* tile_expert, int* tile_start, int routed, int tiles, int first) {
    __shared__ Experts all;
    launch_dependents();  // experts' weights may be asked for while this sorts
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) all.counts[e] = all.before[e] = 0;
    __syncthreads();
    grid_wait();
    each_routed(ids, 0, routed, first, [&](int, int e) { atomicAdd(all.counts + e, 1); });
    __syncthreads();
    sort(all, ids, 0, routed, sorted_ids, offsets, tile_expert, tile_start, tiles, first);
}

// → counts [parts, EXPERTS].
extern "C" __global__ void __launch_bounds__(THREADS) count_parts(const int* ids, int* counts, int routed, int first) {
    __shared__ int found[EXPERTS];
    launch_dependents();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) found[e] = 0;
    __syncthreads();
    grid_wait();
    const int from = blockIdx.x * PART;
    each_routed(ids, from, min(routed, from + PART), first, [&](int, int e) { atomicAdd(found + e, 1); });
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[blockIdx.x * EXPERTS + e] = found[e];
}

extern "C" __global__ void __launch_bounds__(THREADS)
group_parts(const int* ids, const int* counts, int* sorted_ids, int* offsets, int* tile_expert, int* tile_start, int routed,
            int tiles, int first) {
    __shared__ Experts all;
    launch_dependents();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) all.counts[e] = all.before[e] = 0;
    __syncthreads();
    grid_wait();
#pragma unroll 4
    for (int i = threadIdx.x; i < gridDim.x * EXPERTS; i += THREADS) {
        const int part = i / EXPERTS, e = i % EXPERTS, n = counts[i];
        atomicAdd(all.counts + e, n);
        if (part < blockIdx.x) atomicAdd(all.before + e, n);
    }
    __syncthreads();
    const int from = blockIdx.x * PART;
    sort(all, ids, from, min(routed, from + PART), sorted_ids, offsets, tile_expert, tile_start, tiles, first);
}
