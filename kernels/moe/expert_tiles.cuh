// Offsets of each expert's routed tokens and tiles, for kernels that sort by expert: group.cu and expert_mlp.cu.

struct Totals {
    int routed, tiles;
};

// A warp: count(e) is the number of routed tokens of expert e; place(e, start, tile, tiles) gets where its routed
// tokens begin, which its first tile of ROWS is, and how many tiles it has. Returns those of all EXPERTS. Running sums
// go over 32 experts at a time.
template <class Count, class Place> __device__ inline Totals scan_experts(Count count, Place place) {
    const int lane = threadIdx.x % 32;
    Totals before = {};
    for (int e = lane; e - lane < EXPERTS; e += 32) {
        const int n = e < EXPERTS ? count(e) : 0, tiles = (n + ROWS - 1) / ROWS;
        int sum = n, tile_sum = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int a = __shfl_up_sync(0xffffffffu, sum, step), b = __shfl_up_sync(0xffffffffu, tile_sum, step);
            if (lane >= step) sum += a, tile_sum += b;
        }
        if (e < EXPERTS) place(e, before.routed + sum - n, before.tiles + tile_sum - tiles, tiles);
        before.routed += __shfl_sync(0xffffffffu, sum, 31), before.tiles += __shfl_sync(0xffffffffu, tile_sum, 31);
    }
    return before;
}
