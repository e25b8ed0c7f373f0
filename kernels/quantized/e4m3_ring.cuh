// Parts shared by e4m3 GEMMs on Hopper's asynchronous 8-bit tensor-core instructions: a block's tile of 64 GROUPS
// outputs and up to ROWS rows, whose weights, in packed tiles (e4m3_wide.cuh), and rows, as e4m3_encode.cuh leaves
// them, come chunk by chunk of 128 inputs to a ring of STAGES in shared memory, and how its warpgroups multiply them.
//
// Of GROUPS warpgroups each takes 64 outputs: with the first operand in registers, tensor cores would multiply e4m3 no
// faster than 16 bits. They keep about 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437, 3.3.2), so that those of each
// RUN of chunks are scaled and added up in f32: with SETS of two, while the next run is multiplied; else while other
// warpgroups' are. ALIKE packed tiles along the inputs of an output have the same scale. With GATED, halves of packed
// tiles of a gate matrix and an up matrix alternate in a tile. A cluster's SPLIT blocks share a tile; SHARE and OVER
// blocks share rows and weights.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "half2.cuh"
#include "e4m3_wide.cuh"

constexpr int M = 64 * GROUPS, HALVES = M / 8, THREADS = 128 * GROUPS;
constexpr int K_TILES = I / SPAN, CHUNKS = K_TILES / SPLIT;  // packed tiles of an n-tile; also of one chunk each
constexpr int X_BYTES = ROWS * SPAN, W_BYTES = HALVES * HALF_BYTES;
constexpr int STAGE = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr int OUTS = GATED ? M / 2 : M;  // what a tile is to y
constexpr int CLUSTER = SPLIT * SHARE * OVER;
constexpr int PARTS = ROWS / N;  // matmuls of N rows
// Sets of a matmul's sums: two where a thread's registers hold them next to those of the whole tile.
constexpr int SETS = N + ROWS / 2 <= (GROUPS == 4 ? 0 : GROUPS == 3 ? 128 : 192) ? 2 : 1;
// Chunks that tensor cores add up, at most. Half of the stages await a run that is multiplied for each part of the
// rows.
constexpr int LONGEST = PARTS > 1 ? 2 : 4, RUN = ALIKE < LONGEST ? ALIKE : LONGEST;
constexpr int AT_ONCE = SETS == 1 ? PARTS : RUN == 1 ? 8 : 4;  // parts of runs in a round of the loop
constexpr int ROWS_PER_LANE = (ROWS + 31) / 32;  // scales of rows that a lane holds
// Registers of a thread at the start, of one that copies, and of one that multiplies: quantized_wgmma.cu has the
// reason.
constexpr int AT_START = 65536 / (THREADS + 128) / 8 * 8, TO_COPY = GROUPS == 2 ? 40 : 32;
constexpr int REGISTERS = GROUPS == 4 ? 112 : GROUPS == 3 ? 160 : 232;
constexpr int TURN = 2;  // the first of the named barriers of turns, one of each warpgroup
static_assert(GROUPS * REGISTERS + TO_COPY <= (GROUPS + 1) * AT_START);
static_assert(SPLIT == 1 || SHARE * OVER == 1);
static_assert(HALVES <= 32 && ROWS % N == 0 && AT_ONCE % PARTS == 0);
static_assert(ALIKE % RUN == 0 && CHUNKS % RUN == 0);
#include "ring_walk.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A warp has read its part of a stage, which the cluster's blocks that share operands fill, each a part. There is no
// branch: mbarrier_arrive_at_if() has the reason. loaded: whether lanes have read scales there, which TMA does not wait
// for.
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
    PipelineState next = {};  // the run to be multiplied

    // Warpgroups ask for their matmuls in turns: tensor cores do those of one while another adds up its sums. Else all
    // would wait for theirs at once, and then add up at once. The last one gives the first its first turn.
    __device__ inline void begin_turns() const {
        if (group == GROUPS - 1) pass_turn();
    }
    __device__ inline void end_turns() const {
        if (group == 0) take_turn();
    }
    __device__ inline void take_turn() const {
        if constexpr (GROUPS > 1) block_sync<256>(TURN + group);
    }
    __device__ inline void pass_turn() const {
        if constexpr (GROUPS > 1) block_arrive<256>(TURN + (group + 1) % GROUPS);
    }
    // Has tensor cores begin with `part` of the rows of a run's chunk c. scales: as load_scales() has them, for its
    // first.
    template <int SUMS> __device__ inline void begin(int part, int c, float (&made)[SUMS], float (&scales)[2]) {
        PipelineState at = next;
        at.advance(c);
        const unsigned x = ring + at.stage * STAGE, weights = x + X_BYTES;
        if (part == 0) mbarrier_wait(full + at.stage, at.phase);
        take_turn();
        if (c == 0) fence_registers(made);
        wgmma_fence();
#pragma unroll
        for (int p = 0; p < SPAN / 32; p++)
            wgmma_e4m3(made, plain_descriptor(weights + group * 8 * HALF_BYTES + p * 256, 128, HALF_BYTES),
                       smem_descriptor(x + part * N * SPAN + p * 32, 16), c + p > 0);
        wgmma_commit();
        pass_turn();
        if (part + c == 0) load_scales(scales);
    }
    // The run's: of outputs lane / 4 of the warp's 16 and 8 below. Its first chunk is there.
    __device__ inline void load_scales(float (&scales)[2]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const unsigned from = ring + next.stage * STAGE + X_BYTES + warp * PACKED_BYTES + 1024 + lane / 4 * 4;
        scales[0] = __uint_as_float(load_shared4(from)), scales[1] = __uint_as_float(load_shared4(from + HALF_BYTES));
    }
    // Gives back the run's chunk c, once at most LEFT of the chunks begun later are under way; -1: the one before the
    // run.
    template <int LEFT> __device__ inline void end(int part, int c) {
        wgmma_wait<LEFT>();
        PipelineState at = next;
        at.advance(c < 0 ? STAGES - 1 : c);
        if (part == PARTS - 1) release(empty + at.stage, c == 0 || RUN == 1);
    }
    // Multiplies the last chunk of the run before, and adds up what `part` of that has made.
    template <int LEFT>
    __device__ inline void end(int part, float (&made)[N / 2], const float (&scales)[2], float (&sum)[ROWS / 2]) {
        end<LEFT>(part, -1);
        fence_registers(made);
#pragma unroll
        for (int r = 0; r < N / 2; r++) sum[part * (N / 2) + r] += made[r] * scales[r / 2 % 2];
        fence_registers(sum);  // before the next matmul takes the place of what this reads
    }
};

// Sums of COUNT runs, each of one part of the rows: with two sets, one is added up while the next takes place. ptxas
// would have them wait for each other if one were under way from one round of a loop to the next, so that none is at
// the end.
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
__device__ inline void scale_rows(const float (&by)[ROWS_PER_LANE], float (&sum)[ROWS / 2]) {
    const int pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        const float even = __shfl_sync(0xffffffffu, by[j / 4], j % 4 * 8 + pair);
        const float odd = __shfl_sync(0xffffffffu, by[j / 4], j % 4 * 8 + pair + 1);
        sum[j * 4] *= even, sum[j * 4 + 1] *= odd, sum[j * 4 + 2] *= even, sum[j * 4 + 3] *= odd;
    }
}
#endif
