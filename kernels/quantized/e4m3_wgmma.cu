// y [rows, width] = x [rows, I] W^T of numbers in e4m3, by Hopper's asynchronous tensor-core instructions of 8 bits:
// for sm_90a alone. W lies in packed tiles (e4m3_wide.cuh), of which ALIKE along the inputs of an output have the same
// scale; x lies as e4m3_rows.cu leaves it, with a scale for each row: it is left to the end, so that a sum of ALIKE
// packed tiles takes one operation.
//
// A tile has 64 GROUPS outputs and up to ROWS rows. With SPLIT above 1, the blocks of a cluster have one tile and each
// a part of the inputs, and they add their sums up through each other's shared memory. Else a cluster has a tile of each
// of OVER runs of rows, and each of its blocks brings a part of W to all of them, as the second-level cache bounds tiles
// that are read alone; and a cluster goes on to further tiles, whose first chunks come while the sums of the tile before
// are stored.
//
// One warp has copies bring chunks of 128 inputs of W and of x to shared memory, STAGES ahead; as much of W as fits
// before the kernel's predecessor has ended. e4m3_ring.cuh has what multiplies them. With GATED, W is a gate matrix
// over an up matrix, and y = act(gate) * up. With BIAS, bias [outputs] is added. Rows of x past `height` are whatever
// lies there.
#include "e4m3_ring.cuh"

static_assert(SHARE == 1);
constexpr int PITCH = M + 4;  // of the sums [ROWS, M] f32, where the chunks were: without bank conflicts
#include "wgmma_tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The tiles of this block's cluster, one after the other.
struct Tiles {
    int row_tiles, columns, height, count;  // count: of this cluster's

    __device__ Tiles(int rows, int width, int height) : height(height) {
        row_tiles = (rows + height - 1) / height, columns = (width + OUTS - 1) / OUTS;
        const int all = (row_tiles + OVER - 1) / OVER * columns, clusters = gridDim.x / CLUSTER;
        count = (all - (int)blockIdx.x / CLUSTER + clusters - 1) / clusters;
    }
    __device__ Tile operator[](int i) const {
        return Tile(blockIdx.x / CLUSTER + i * (gridDim.x / CLUSTER), row_tiles, columns, height);
    }
};

// The chunks of the tiles, one after the other: a tile's place takes many instructions.
struct Walk {
    const Tiles& tiles;
    int index = 0, chunk = 0;
    Tile tile;
    PipelineState pipe;

    __device__ Walk(const Tiles& tiles) : tiles(tiles), tile(tiles[0]) {}
    __device__ inline bool more() const { return index < tiles.count; }
    __device__ inline void advance() {
        pipe.advance();
        if (++chunk < CHUNKS) return;
        chunk = 0;
        if (++index < tiles.count) tile = tiles[index];
    }
};

// The tiles' parts of W and of x, chunk by chunk, by one lane.
__device__ inline void produce(const TensorMap* of_x, const unsigned char* weight, unsigned ring, Barrier* full,
                               Barrier* empty, const Tiles& tiles, int n_tiles) {
    const int over = cluster_rank() % OVER, height = tiles.height;  // over: this block's place, if they share W
    constexpr int RUN = GATED ? 1 : 2;  // half packed tiles that are consecutive in memory and in the ring
    auto ask = [&](const Walk& at) {  // for a chunk's part of W
        Barrier* const barrier = full + at.pipe.stage;
        mbarrier_expect(barrier, W_BYTES + height * SPAN);
#pragma unroll
        for (int i = over * (HALVES / OVER); i < (over + 1) * (HALVES / OVER); i += RUN) {
            const int half = at.tile.first / 8 + (GATED ? i / 2 : i);
            const int there = (GATED ? i % 2 * n_tiles : 0) + min(half / 2, n_tiles - 1);  // what is past the end is not stored
            const unsigned to = ring + at.pipe.stage * STAGE + X_BYTES + i * HALF_BYTES;
            const unsigned char* const from =
                weight + ((long long)there * K_TILES + at.tile.rank * CHUNKS + at.chunk) * PACKED_BYTES + half % 2 * HALF_BYTES;
            if constexpr (OVER > 1)
                bulk_load_multicast(to, from, RUN * HALF_BYTES, barrier, 3);
            else
                bulk_load(to, from, RUN * HALF_BYTES, barrier);
        }
    };
    auto ask_x = [&](const Walk& at) {
        const int chunk = at.tile.rank * CHUNKS + at.chunk;  // SPAN / 2: in elements of two bytes
        tma_load(ring + at.pipe.stage * STAGE, of_x, chunk * (SPAN / 2), at.tile.row, full + at.pipe.stage);
    };
    Walk first(tiles), next(tiles);
    fill_ring(first, next, empty, ask, ask_x);
}

// Sums in registers of a tile that this block has alone, of `rows` rows of y: pairs of rows become pairs of outputs.
__device__ inline void store_sums(const float (&sum)[ROWS / 2], const T* bias, T* y, const Tile& tile, int width, int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = tile.first + warp * (GATED ? 8 : 16);
    auto added = [&](int out, int half) { return BIAS && out < width ? to_float(bias[half * width + out]) : 0; };
    const float low = added(first + g, 0), high = GATED ? added(first + g, 1) : added(first + g + 8, 0);
    const int column = first + (GATED ? t * 2 : t % 2 * 8 + t / 2 * 4);
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        if (j * 8 >= rows) break;
        const float* const v = sum + j * 4;
        T* const to = y + (long long)(tile.row + j * 8 + g) * width + column;
        const bool mine = j * 8 + g < rows && column < width;
        if constexpr (GATED) {
            const float even = gated<T, ACT>(v[0] + low, v[2] + high), odd = gated<T, ACT>(v[1] + low, v[3] + high);
            const unsigned pair = transpose_8x8(pack<T>(even, odd));
            if (mine) *(unsigned*)to = pair;  // width is a multiple of 16
        } else {
            unsigned a = transpose_8x8(pack<T>(v[0] + low, v[1] + low)), b = transpose_8x8(pack<T>(v[2] + high, v[3] + high));
            swap_lanes(a, b, 1);  // four outputs side by side
            if (width % 4 == 0) {
                if (mine) *(uint2*)to = make_uint2(a, b);
            } else {
                const float2 x = unpack<T>(a), z = unpack<T>(b);
                const float four[] = {x.x, x.y, z.x, z.y};
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (mine && column + i < width) to[i] = from_float<T>(four[i]);
            }
        }
    }
}

// Adds up a tile that the cluster's blocks share.
__device__ inline void add_up(float* sums, const float (&sum)[ROWS / 2], const T* bias, T* y, const Tile& tile, int width,
                              int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, apart = GATED ? OUTS : 8;
    block_sync<THREADS>(1);  // the last chunks have been read
    float* const here = sums + lane % 4 * 2 * PITCH + warp * (GATED ? 8 : 16) + lane / 4;
#pragma unroll
    for (int r = 0; r < ROWS / 2; r++) here[(r / 4 * 8 + r % 2) * PITCH + r % 4 / 2 * apart] = sum[r];
    cluster_sync();
    store(sums, bias, y, tile, width, rows);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
e4m3_wgmma(const __grid_constant__ TensorMap of_x, const float* x_scales, const unsigned char* weight, const T* bias, T* y,
           int rows, int outputs, int height) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier full[STAGES], empty[STAGES];
    const unsigned ring = (smem_address(memory) + 1023) / 1024 * 1024;
    const int thread = threadIdx.x, width = GATED ? outputs / 2 : outputs;
    if (thread == 0) init_ring(full, empty, THREADS / 32 * OVER);
    if constexpr (CLUSTER > 1)
        cluster_sync();  // the others' barriers are there, too
    else
        __syncthreads();
    if (thread >= THREADS) {
        if constexpr (GROUPS > 1) set_registers<TO_COPY>(false);
        if (thread / 32 == THREADS / 32 && elected())
            produce(&of_x, weight, ring, full, empty, Tiles(rows, width, height), (width + 15) / 16);
    } else {
        if constexpr (GROUPS > 1) set_registers<REGISTERS>(true);
        grid_wait();
        const Tiles tiles(rows, width, height);
        Chunks chunks{ring, (int)__shfl_sync(0xffffffffu, thread / 128, 0), full, empty};
        chunks.begin_turns();
#pragma unroll 1
        for (int i = 0; i < tiles.count; i++) {
            const Tile tile = tiles[i];
            const int mine = min(height, rows - tile.row);
            float sum[ROWS / 2], x_scales_here[ROWS_PER_LANE];
#pragma unroll
            for (int j = 0; j < ROWS_PER_LANE; j++) {
                const int row = thread % 32 + j * 32;
                x_scales_here[j] = row < mine ? x_scales[tile.row + row] : 0;
            }
            multiply(chunks, sum);
            scale_rows(x_scales_here, sum);
            if constexpr (SPLIT > 1)
                add_up((float*)((char*)memory + (ring - smem_address(memory))), sum, bias, y, tile, width, mine);
            else
                store_sums(sum, bias, y, tile, width, mine);
        }
        chunks.end_turns();
        if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while another may read or write there
    }
#endif
}
