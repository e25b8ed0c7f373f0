// How the tokens that a block of mla_decode.cu takes come to the ring in shared memory.

// What a warp copies: four tokens of each tile, all in one panel. Rows past `stop` become zeros.
struct Rows {
    const char* cache;
    const unsigned char* scales;
    const int* table;
    unsigned ring;
    int start, stop;
    int slots, ahead;  // of the tiles from a multiple of 8 on, and of the 8 behind them: lane l has row l % 4 of tile l / 4

    __device__ Rows(const T* cache, const unsigned char* scales, const int* table, unsigned ring, const Span& span)
        : cache((const char*)cache), scales(scales), table(table), ring(ring), start(span.start + first()), stop(span.stop) {
        slots = find(0), ahead = find(8);
    }
    __device__ static int first() { return threadIdx.x / 32 * 4; }  // in a tile
    __device__ static int panel() { return first() / PANEL; }
    // Past the first-level cache, where another step may have left tables: grid_wait() has not been passed.
    __device__ int find(int tile) const {
        const int token = start + (tile + threadIdx.x % 32 / 4) * TILE + threadIdx.x % 4;
        return token < stop ? __ldcg(table + token / SIZE) * SIZE + token % SIZE : -1;
    }
    // To be called once for each tile, one after the other, from 0 on.
    __device__ void turn_to(int tile) {
        if (tile % 8 || !tile) return;
        slots = ahead, ahead = find(tile + 8);
    }
    // Tiles from this one on, of the first EARLY.
    __device__ void prefetch(int tile) const {
        const int mine = threadIdx.x % 32 / 4;
        if (mine >= tile && mine < EARLY && slots >= 0) prefetch_bulk(cache + (long long)slots * ROW, ROW);
    }
    // The rows of `some`'s bits.
    __device__ void copy(int tile, int some) const {
        const int lane = threadIdx.x % 32, row = first() % PANEL, from = tile % 8 * 4;
        const unsigned to = ring + (tile * 2 + panel()) % HELD * PANEL_BYTES;
        const char* const piece = cache + lane * 16;
        const int place = row * ROW, across = lane ^ (FP8 ? row / 2 % 4 : row % 8);
#pragma unroll
        for (int r = 0; r < 4; r++) {  // pieces `lane` and, but for FP8, lane + 32, as swizzled() has them
            const int slot = __shfl_sync(~0u, slots, from + r);
            if (!(some >> r & 1)) continue;
            const char* x = piece + (long long)max(slot, 0) * ROW;
            const unsigned at = to + place + r * ROW + (across ^ (FP8 ? r / 2 : r)) * 16;
            copy_async16(at, x, slot >= 0);
            if (!FP8) copy_async16(at + 512, x + 512, slot >= 0);
        }
        constexpr int REST = ROW / 16 % 32;  // pieces of each row, that lanes have side by side
        const int r = lane / REST % 4, slot = __shfl_sync(~0u, slots, from + r), last = ROW / 16 - REST + lane % REST;
        if (lane < 4 * REST && (some >> r & 1))
            copy_async16(to + swizzled(row + r, last), cache + (long long)max(slot, 0) * ROW + last * 16, slot >= 0);
    }
    // A panel's scales, which lie side by side in the cache: by the first of the panel's warps, of the latents and of the rope
    // part by a lane each. All of the panel's tokens have to be there.
    __device__ void copy_scales(int tile) const {
        if (FP8 && first() % PANEL == 0) {
            const int slot = __shfl_sync(~0u, slots, tile % 8 * 4), at = max(slot, 0), part = threadIdx.x % 32;
            const unsigned to = ring + (tile * 2 + panel()) % HELD * PANEL_BYTES + PANEL * ROW + part * PANEL;
            if (part < 2) copy_async16(to, scales + (at / SIZE * 2 + part) * SIZE + at % SIZE, slot >= 0);
        }
    }
};

// Tiles that a warp's copies are ahead of the tile that is multiplied, of the first or the second panel of each.
__device__ constexpr int tiles_ahead(int panel) { return (HELD - 1 - panel) / 2; }

// Until this thread's copies of a tile are there.
template <int AHEAD> __device__ inline void wait_for_tile(bool first) {
    if (first)
        wait_for_groups<AHEAD>();
    else  // the newest tile has not been asked for yet
        wait_for_groups<AHEAD - 1>();
}
__device__ inline void wait_for_tile_of(int panel, bool first) {
    if (panel)
        wait_for_tile<tiles_ahead(1)>(first);
    else
        wait_for_tile<tiles_ahead(0)>(first);
}

// The ring's first tiles, but for the step's own token, a group for each tile but the last of the part: what may be read
// before the kernel's predecessor has ended; what has no room there is brought near. Then, after it, the rest of them.
__device__ inline void copy_early(Rows& rows, int tiles, int most, int newest) {
#pragma unroll 1
    for (int t = 0; t <= most && t < tiles; t++) {
        const int r = newest - t * TILE - Rows::first();  // if it is one of this warp's rows of the tile
        rows.copy(t, r >= 0 && r < 4 ? 15 & ~(1 << r) : 15);
        if (newest / PANEL != t * 2 + Rows::panel()) rows.copy_scales(t);
        if (t < tiles - 1) commit_copies();
    }
    rows.prefetch(most + 1);
}
__device__ inline void copy_newest(const Rows& rows, int tiles, int most, int newest) {
    const int t = newest / TILE, r = newest % TILE - Rows::first();
    if (t <= most && t < tiles && r >= 0 && r < 4) rows.copy(t, 1 << r);
    if (t <= most && t < tiles && newest / PANEL % 2 == Rows::panel()) rows.copy_scales(t);
#pragma unroll 1
    for (int i = min(tiles - 1, most + 1); i <= most; i++) commit_copies();
}
