// y [rows, width] = x [rows, I] W^T of numbers in e4m3, by Hopper's asynchronous tensor-core instructions of 8 bits: for
// sm_90a alone. W lies in pieces (e4m3_wide.cuh), of which ALIKE along the inputs of an output have the same scale; x lies
// as e4m3_rows.cu leaves it, with a scale for each row: it is left to the end, so that a sum of ALIKE pieces takes one
// operation.
//
// A tile has 64 GROUPS outputs and up to ROWS rows. With SPLIT above 1, the blocks of a cluster have one tile and each a
// part of the inputs, and they add their sums up through each other's shared memory. Else a cluster has SHARE tiles side
// by side of each of OVER runs of rows: of x that SHARE blocks have in common, and of W that OVER blocks do, each brings
// a part to all of them, as the second-level cache bounds tiles that are read alone; and a cluster goes on to further
// tiles, whose first chunks come while the sums of the tile before are stored.
//
// One warp has copies bring chunks of 128 inputs of W and of x to shared memory, STAGES ahead; as much of W as fits before
// the kernel's predecessor has ended. Of GROUPS warpgroups each takes 64 outputs: with the first operand in registers,
// tensor cores would multiply e4m3 no faster than 16 bits. They keep about 14 bits of a sum (DeepSeek-V3, arXiv
// 2412.19437, 3.3.2), so that those of each RUN of chunks are scaled and added up in f32: with SETS of two, while the next
// run is multiplied; else while other warpgroups' are. With GATED, W is a gate matrix over an up matrix, whose halves of
// pieces alternate in a tile, and y = act(gate) * up. With BIAS, bias [outputs] is added. Rows of x past `height` are
// whatever lies there.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "pairs.cuh"
#include "e4m3_wide.cuh"

constexpr int M = 64 * GROUPS, HALVES = M / 8, THREADS = 128 * GROUPS;
constexpr int PIECES = I / SPAN, CHUNKS = PIECES / SPLIT;  // pieces of a strip; also of one chunk each
constexpr int X_BYTES = ROWS * SPAN, W_BYTES = HALVES * HALF_PIECE;
constexpr int STAGE = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr int OUTS = GATED ? M / 2 : M;  // what a tile is to y
constexpr int CLUSTER = SPLIT * SHARE * OVER;
constexpr int PARTS = ROWS / N;  // matmuls of N rows
// Sets of a matmul's sums: two where a thread's registers hold them beside those of the whole tile.
constexpr int SETS = N + ROWS / 2 <= (GROUPS == 4 ? 0 : GROUPS == 3 ? 128 : 192) ? 2 : 1;
// Chunks that tensor cores add up, at most. Half of the stages await a run that is multiplied for each part of the rows.
constexpr int LONGEST = PARTS > 1 ? 2 : 4, RUN = ALIKE < LONGEST ? ALIKE : LONGEST;
constexpr int AT_ONCE = SETS == 1 ? PARTS : RUN == 1 ? 8 : 4;  // parts of runs in a round of the loop
constexpr int HELD = (ROWS + 31) / 32;  // scales of rows that a lane holds
// Registers of a thread at the start, of one that copies, and of one that multiplies: quantized_wgmma.cu says why.
constexpr int AT_START = 65536 / (THREADS + 128) / 8 * 8, TO_COPY = GROUPS == 2 ? 40 : 32;
constexpr int REGISTERS = GROUPS == 4 ? 112 : GROUPS == 3 ? 160 : 232;
static_assert(GROUPS * REGISTERS + TO_COPY <= (GROUPS + 1) * AT_START);
constexpr int PITCH = M + 4;  // of the sums [ROWS, M] f32, where the chunks were: without bank conflicts
static_assert(SPLIT == 1 || SHARE * OVER == 1);
static_assert(HALVES <= 32 && ROWS % N == 0 && AT_ONCE % PARTS == 0);
static_assert(ALIKE % RUN == 0 && CHUNKS % RUN == 0);
#include "wgmma_tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The tiles of this block's cluster, one after the other.
struct Tiles {
    int row_tiles, columns, height, count;  // columns: of runs of OUTS * SHARE outputs; count: of this cluster's

    __device__ Tiles(int rows, int width, int height) : height(height) {
        row_tiles = (rows + height - 1) / height, columns = (width + OUTS * SHARE - 1) / (OUTS * SHARE);
        const int all = (row_tiles + OVER - 1) / OVER * columns, clusters = gridDim.x / CLUSTER;
        count = (all - (int)blockIdx.x / CLUSTER + clusters - 1) / clusters;
    }
    __device__ Tile operator[](int i) const {
        return Tile(blockIdx.x / CLUSTER + i * (gridDim.x / CLUSTER), row_tiles, columns, height);
    }
};

// Where the ring is.
struct Place {
    int stage = 0, round = 0;

    __device__ inline void advance(int chunks = 1) {
        stage += chunks % STAGES, round ^= chunks / STAGES & 1;
        if (stage >= STAGES) stage -= STAGES, round ^= 1;
    }
};

// The chunks of the tiles, one after the other: a tile's place takes many instructions.
struct Walk {
    const Tiles& tiles;
    int index = 0, chunk = 0;
    Tile tile;
    Place place;

    __device__ Walk(const Tiles& tiles) : tiles(tiles), tile(tiles[0]) {}
    __device__ inline bool more() const { return index < tiles.count; }
    __device__ inline void advance() {
        place.advance();
        if (++chunk < CHUNKS) return;
        chunk = 0;
        if (++index < tiles.count) tile = tiles[index];
    }
};

// The tiles' parts of W and of x, chunk by chunk, by one lane.
__device__ inline void produce(const TensorMap* of_x, const unsigned char* weight, unsigned ring, Barrier* full,
                               Barrier* empty, const Tiles& tiles, int strips) {
    const int column = cluster_rank() % SHARE, over = cluster_rank() / SHARE % OVER;  // this block's place, if they share
    const int height = tiles.height;
    constexpr int RUN = GATED ? 1 : 2;  // halves that lie side by side there and here
    auto ask = [&](const Walk& at) {  // for a chunk's part of W
        Barrier* const barrier = full + at.place.stage;
        mbarrier_expect(barrier, W_BYTES + height * SPAN);
#pragma unroll
        for (int i = over * (HALVES / OVER); i < (over + 1) * (HALVES / OVER); i += RUN) {
            const int half = at.tile.first / 8 + (GATED ? i / 2 : i);
            const int there = (GATED ? i % 2 * strips : 0) + min(half / 2, strips - 1);  // what is past the end is not stored
            const unsigned to = ring + at.place.stage * STAGE + X_BYTES + i * HALF_PIECE;
            const unsigned char* const from =
                weight + ((long long)there * PIECES + at.tile.rank * CHUNKS + at.chunk) * PIECE + half % 2 * HALF_PIECE;
            if constexpr (OVER > 1)
                bulk_load_multicast(to, from, RUN * HALF_PIECE, barrier, (1 << column) * (SHARE > 1 ? 5 : 3));
            else
                bulk_load(to, from, RUN * HALF_PIECE, barrier);
        }
    };
    auto ask_x = [&](const Walk& at) {
        Barrier* const barrier = full + at.place.stage;
        const int chunk = at.tile.rank * CHUNKS + at.chunk, part = height / SHARE;
        const unsigned to = ring + at.place.stage * STAGE;
        const int input = chunk * (SPAN / 2);  // in elements of two bytes
        if constexpr (SHARE > 1)
            tma_load_multicast(to + column * part * SPAN, of_x, input, at.tile.row + column * part, barrier, 3 << 2 * over);
        else
            tma_load(to, of_x, input, at.tile.row, barrier);
    };
    Walk first(tiles), next(tiles);
#pragma unroll 1
    for (int n = 0; n < STAGES && first.more(); n++, first.advance()) ask(first);
    grid_wait();
    launch_dependents();
#pragma unroll 1
    for (int n = 0; n < STAGES && next.more(); n++, next.advance()) ask_x(next);
#pragma unroll 1
    for (; next.more(); next.advance()) {
        mbarrier_wait(empty + next.place.stage, next.place.round ^ 1);
        ask(next);
        ask_x(next);
    }
}

// A warp has read its part of a stage, which the cluster's blocks that share operands fill, each a part. There is no
// branch: mbarrier_arrive_at_if() says why. loaded: whether lanes have read scales there, which TMA does not wait for.
__device__ inline void release(Barrier* empty, bool loaded) {
    const int lane = threadIdx.x % 32, first = SPLIT > 1 ? cluster_rank() : 0;
    if (loaded) fence_async_proxy();
    __syncwarp();
    if constexpr (CLUSTER > 1)
        mbarrier_arrive_at_if(lane < SHARE * OVER, empty, first + lane % (SHARE * OVER));
    else
        mbarrier_arrive_if(lane == 0, empty);
}

// A warpgroup's way through the chunks of its 64 outputs, RUN of them at a time.
struct Chunks {
    unsigned ring;
    int group;  // the warpgroup, which ptxas knows to be the same of all lanes
    Barrier *full, *empty;
    Place next = {};  // the run to be multiplied

    // Has tensor cores begin with `part` of the rows of a run's chunk c. scales: as load_scales() has them, for its first.
    template <int SUMS> __device__ inline void begin(int part, int c, float (&made)[SUMS], float (&scales)[2]) {
        Place at = next;
        at.advance(c);
        const unsigned x = ring + at.stage * STAGE, weights = x + X_BYTES;
        if (part == 0) mbarrier_wait(full + at.stage, at.round);
        if (c == 0) fence_registers(made);
        wgmma_fence();
#pragma unroll
        for (int p = 0; p < SPAN / 32; p++)
            wgmma_e4m3(made, plain_descriptor(weights + group * 8 * HALF_PIECE + p * 256, 128, HALF_PIECE),
                       smem_descriptor(x + part * N * SPAN + p * 32, 16), c + p > 0);
        wgmma_commit();
        if (part + c == 0) load_scales(scales);
    }
    // The run's: of outputs lane / 4 of the warp's 16 and 8 below. Its first chunk is there.
    __device__ inline void load_scales(float (&scales)[2]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const unsigned from = ring + next.stage * STAGE + X_BYTES + warp * PIECE + 1024 + lane / 4 * 4;
        scales[0] = __uint_as_float(load_shared4(from)), scales[1] = __uint_as_float(load_shared4(from + HALF_PIECE));
    }
    // Gives back the run's chunk c, once at most LEFT of the chunks begun later are under way; -1: the one before the run.
    template <int LEFT> __device__ inline void end(int part, int c) {
        wgmma_wait<LEFT>();
        Place at = next;
        at.advance(c < 0 ? STAGES - 1 : c);
        if (part == PARTS - 1) release(empty + at.stage, c == 0 || RUN == 1);
    }
    // The same of the last chunk of the run before, and adds up what `part` of that has made.
    template <int LEFT>
    __device__ inline void end(int part, float (&made)[N / 2], const float (&scales)[2], float (&sum)[ROWS / 2]) {
        end<LEFT>(part, -1);
        fence_registers(made);
#pragma unroll
        for (int r = 0; r < N / 2; r++) sum[part * (N / 2) + r] += made[r] * scales[r / 2 % 2];
        fence_registers(sum);  // before the next matmul takes the place of what this reads
    }
};

// Sums of COUNT runs, each of one part of the rows: with two sets, one is added up while the next takes place. ptxas would
// have them wait for each other if one were under way from one round of a loop to the next, so that none is at the end.
template <int COUNT> __device__ inline void add_runs(Chunks& chunks, float (&sum)[ROWS / 2]) {
    float made[SETS][N / 2], scales[SETS][2];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int part = i % PARTS, last = (i + PARTS - 1) % PARTS, set = i % SETS, before = (i + 1) % SETS;
        float (&of_run)[2] = scales[i / PARTS % SETS];
        chunks.begin(part, 0, made[set], of_run);
        if (SETS == 2 && i) chunks.end<1>(last, made[before], scales[(i - 1) / PARTS % SETS], sum);
#pragma unroll
        for (int c = 1; c < RUN; c++) {
            chunks.begin(part, c, made[set], of_run);
            chunks.end<1>(part, c - 1);
        }
        if (part == PARTS - 1) chunks.next.advance(RUN);
        if (SETS == 1 || i == COUNT - 1) chunks.end<0>(part, made[set], of_run, sum);
    }
}

// The sums of a warpgroup's 64 outputs: of outputs lane / 4 of the warp's 16 and 8 below, pairs of rows lane % 4 * 2 of
// each eight.
__device__ inline void multiply(Chunks& chunks, float (&sum)[ROWS / 2]) {
    constexpr int COUNT = CHUNKS / RUN * PARTS;
#pragma unroll
    for (int r = 0; r < ROWS / 2; r++) sum[r] = 0;
#pragma unroll 1
    for (int i = 0; i < COUNT / AT_ONCE; i++) add_runs<AT_ONCE>(chunks, sum);
    if constexpr (COUNT % AT_ONCE) add_runs<COUNT % AT_ONCE>(chunks, sum);
}

// Sums times the scales of their rows, of which lane i holds those of rows i + 32 j.
__device__ inline void scale_rows(const float (&held)[HELD], float (&sum)[ROWS / 2]) {
    const int pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        const float even = __shfl_sync(0xffffffffu, held[j / 4], j % 4 * 8 + pair);
        const float odd = __shfl_sync(0xffffffffu, held[j / 4], j % 4 * 8 + pair + 1);
        sum[j * 4] *= even, sum[j * 4 + 1] *= odd, sum[j * 4 + 2] *= even, sum[j * 4 + 3] *= odd;
    }
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

// The same of a tile that the cluster's blocks have together.
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
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, THREADS / 32 * SHARE * OVER);
        }
        fence_mbarrier_init();
    }
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
#pragma unroll 1
        for (int i = 0; i < tiles.count; i++) {
            const Tile tile = tiles[i];
            const int mine = min(height, rows - tile.row);
            float sum[ROWS / 2], held[HELD];
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const int row = thread % 32 + j * 32;
                held[j] = row < mine ? x_scales[tile.row + row] : 0;
            }
            multiply(chunks, sum);
            scale_rows(held, sum);
            if constexpr (SPLIT > 1)
                add_up((float*)((char*)memory + (ring - smem_address(memory))), sum, bias, y, tile, width, mine);
            else
                store_sums(sum, bias, y, tile, width, mine);
        }
        if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while another may read or write there
    }
#endif
}
