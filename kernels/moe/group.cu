// Sorts pairs of a token and an expert by expert, in one block, and cuts each expert's pairs into tiles of ROWS. (Of few pairs
// each block of expert_mlp.cu does the same, in shared memory: expert_items.cuh.)
//
// ids [pairs] → order [pairs]: pairs, expert by expert; ends [EXPERTS + 1]: where each expert's begin; tile_expert and
// tile_start [tiles]: a tile's expert and its first place in `order`. Tiles that are not needed have expert -1. Pairs
// of one expert come in any order: every one of them is computed for itself. Of more experts than EXPERTS, those from
// `first` on are sorted; pairs of the others are in no tile.
#include "expert_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
group(const int* ids, int* order, int* ends, int* tile_expert, int* tile_start, int pairs, int tiles, int first) {
    __shared__ int counts[EXPERTS], starts[EXPERTS], first_tile[EXPERTS], total_tiles;
    const int lane = threadIdx.x % 32;
    launch_dependents();  // experts' weights may be asked for while this sorts
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
    __syncthreads();
    grid_wait();
#pragma unroll 8
    for (int p = threadIdx.x; p < pairs; p += THREADS) {
        const int e = ids[p] - first;
        if ((unsigned)e < EXPERTS) atomicAdd(counts + e, 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const Totals all = place_experts(
            [&](int e) { return counts[e]; },
            [&](int e, int start, int tile, int) { starts[e] = start, first_tile[e] = tile, ends[e] = start; });
        if (lane == 0) ends[EXPERTS] = all.pairs, total_tiles = all.tiles;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS)
        for (int i = 0; i * ROWS < counts[e]; i++)
            tile_expert[first_tile[e] + i] = e, tile_start[first_tile[e] + i] = starts[e] + i * ROWS;
    for (int i = total_tiles + threadIdx.x; i < tiles; i += THREADS) tile_expert[i] = -1;
    __syncthreads();  // `starts` counts on from here
#pragma unroll 8
    for (int p = threadIdx.x; p < pairs; p += THREADS) {
        const int e = ids[p] - first;
        if ((unsigned)e < EXPERTS) order[atomicAdd(starts + e, 1)] = p;
    }
}
