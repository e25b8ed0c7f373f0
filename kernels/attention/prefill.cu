// softmax(scale q k^T) v of prompts over the paged cache, causal: 128 rows of one head at a time, for sm_90 alone.
//
// One warp has TMA bring keys and values from the cache, block by block, to shared memory, STAGES tiles of TILE
// tokens ahead and on into the block's next rows; two groups of four warps multiply them by asynchronous
// tensor-core instructions, 64 rows each. While a tile's scores become weights, the GEMMs of the next scores and of
// the last values are under way. Long heads leave few registers for q, some or most of which is read from shared
// memory then. Its bandwidth limits heads of 256. Online softmax after FlashAttention-2 and its overlap after
// FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608). All operands lie in boxes of 64 elements with TMA's 128-byte
// swizzle. The last box of a head of another size has what lies behind the head, too, or zeros: matmuls leave that out.
#include "tma.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, RUNS = (DIM + 63) / 64;  // runs of 64 elements, of a head
constexpr bool Q_SHARED = Q_IN_REGS < DIM / 16;  // of q's steps of 16 elements Q_IN_REGS lie in registers
constexpr int Q_BYTES = ROWS * RUNS * 128, TILE_BYTES = TILE * RUNS * 128;
constexpr int PER_TILE = TILE / BOX;  // boxes of BOX tokens, of one cache block each

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct Work {  // of an item: a sequence's rows, as prefill_work() of kernels/attention/prefill.py lists them
    int sequence, row, rows, position, length;

    __device__ Work(const int* items, int i) {
        int4 a = *(const int4*)(items + i * 8);
        sequence = a.x, row = a.y, rows = a.z, position = a.w, length = items[i * 8 + 4];
    }
    __device__ int first() const { return WINDOW ? max(position + 1 - WINDOW, 0) / TILE : 0; }
    __device__ int stop() const { return (position + rows + TILE - 1) / TILE; }
};

// Which item is a block's n-th: there and back again, as the costly ones come first.
__device__ inline int pick(int n) { return n * gridDim.x + (n % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }

// The softmax of two rows, 8 apart, of which a lane has a quarter.
struct Rowwise {
    float top[2], sum[2], shrink[2];

    // A tile's scores become weights: of keys `from` on for position `row`, and 8 further for the other.
    __device__ void weigh(float (&s)[TILE / 2], int row, int from, bool masked, float scale, float softcap) {
        const int lane = threadIdx.x % 32;
        if (SOFTCAP) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) s[i] = score<SOFTCAP>(s[i], scale, softcap);
        }
        if (masked) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                int key = from + i / 4 * 8 + lane % 4 * 2 + i % 2, at = row + i % 4 / 2 * 8;
                bool out = key > at || (WINDOW && key + WINDOW <= at);
                s[i] = out ? MINUS_INFINITY : s[i];
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float best = top[h];
#pragma unroll
            for (int i = 0; i < TILE / 2; i += 4) best = fmaxf(best, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            // A row that has seen no key yet would subtract infinities.
            float by = SOFTCAP ? 1 : scale, base = best == MINUS_INFINITY ? 0 : best * by;
            shrink[h] = exp2_approx(top[h] * by - base);
            top[h] = best;
            float total = 0;
#pragma unroll
            for (int i = 0; i < TILE / 2; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float& x = s[i + 2 * h + j];
                    x = exp2_approx(x * by - base);
                    total += x;
                }
            }
            sum[h] = sum[h] * shrink[h] + total;
        }
    }
};

// Packs weights as the operand of a matmul: not while matmuls are under way that read the one before.
__device__ inline void pack(unsigned (&p)[TILE / 16][4], float (&s)[TILE / 2]) {
    fence_registers(s);
#pragma unroll
    for (int i = 0; i < TILE / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) p[i][j] = pack<T>(s[i * 8 + j * 2], s[i * 8 + j * 2 + 1]);
}

struct Shared {  // what lies in shared memory: of rows, of a ring of keys and of one of values
    unsigned q, k, v;
    Barrier *q_full, *q_empty, *k_full, *k_empty, *v_full, *v_empty;
};

// One warp has TMA bring the block's items.
__device__ __forceinline__ void load_items(const TensorMap& of_q, const TensorMap& of_k, const TensorMap& of_v, const int* items,
                                           int count, const int* tables, int table_row, const Shared& shared, int lane) {
    int t = 0, n = 0;
    for (int i; (i = pick(n)) < count * HEADS; n++) {
        const Work work(items, i / HEADS);
        const int head = i % HEADS, column = head / (HEADS / KV_HEADS) * DIM;
        const int* table = tables + (long long)work.sequence * table_row;
        auto block = [&](int j) {  // of the cache, for this lane's box of a tile
            int token = j * TILE + lane * BOX;
            return lane < PER_TILE && token < work.length ? table[token / SIZE] * SIZE + token % SIZE : -1;
        };
        int row = block(work.first());
        if (n) mbarrier_wait(shared.q_empty, n - 1);
        if (lane == 0) {
            mbarrier_expect(shared.q_full, Q_BYTES);
            for (int h = 0; h < RUNS; h++)
                tma_load(shared.q + h * ROWS * 128, &of_q, head * DIM + h * 64, work.row, shared.q_full);
        }
        for (int j = work.first(); j < work.stop(); j++, t++) {
            const int stage = t % STAGES, here = min(PER_TILE, (work.length - j * TILE + BOX - 1) / BOX), now = row;
            row = block(j + 1);
            auto bring = [&](const TensorMap* map, unsigned at, Barrier* full, Barrier* empty) {
                if (t >= STAGES) mbarrier_wait(empty + stage, t / STAGES - 1);
                if (lane == 0) mbarrier_expect(full + stage, here * BOX * RUNS * 128);
                __syncwarp();
                if (now >= 0)
                    for (int h = 0; h < RUNS; h++)
                        tma_load(at + stage * TILE_BYTES + (h * TILE + lane * BOX) * 128, map, column + h * 64, now,
                                 full + stage);
            };
            bring(&of_k, shared.k, shared.k_full, shared.k_empty);
            bring(&of_v, shared.v, shared.v_full, shared.v_empty);
        }
    }
}

// Has tensor cores begin with a tile's scores of a group's rows; skip: the block's rows before these.
__device__ __forceinline__ void multiply_keys(float (&s)[TILE / 2], unsigned (&q)[Q_IN_REGS][4], unsigned q_at, int skip, unsigned tile) {
    fence_registers(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        const auto keys = smem_descriptor(tile + k / 4 * TILE * 128 + k % 4 * 32, 16);
        if (k < Q_IN_REGS)
            wgmma<false>(T(), s, q[k < Q_IN_REGS ? k : 0], keys, k > 0);
        else
            wgmma(T(), s, smem_descriptor(q_at + (k / 4 * ROWS + skip) * 128 + k % 4 * 32, 16), keys, k > 0);
    }
    wgmma_commit();
}

// Multiplies a tile's values by their weights.
__device__ __forceinline__ void multiply_values(float (&o)[DIM / 2], unsigned (&p)[TILE / 16][4], unsigned tile) {
    fence_registers(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) wgmma<true>(T(), o, p[k], smem_descriptor(tile + k * 2048, TILE * 128), true);
    wgmma_commit();
}

// Values past the end of a tile of which `valid` tokens are there become zeros: whatever lies there, a NaN too, stays out. Both
// groups may write them.
__device__ __forceinline__ void clear_rest(unsigned values, int stage, int valid, int thread) {
    const int vecs = (TILE - valid) * 8;
    for (int k = thread % 128; k < vecs * RUNS; k += 128)
        zero_smem(values + stage * TILE_BYTES + (k / vecs * TILE + valid) * 128 + k % vecs * 16);
    fence_async_proxy();
}

// Rescales the sums where a tile has a row's largest score.
__device__ __forceinline__ void shrink(float (&o)[DIM / 2], const Rowwise& rows) {
    // Long heads have as much to shrink as to multiply, and mostly for nothing.
    if (!Q_SHARED || __any_sync(~0u, rows.shrink[0] != 1 || rows.shrink[1] != 1))
#pragma unroll
        for (int k = 0; k < DIM / 2; k++) o[k] *= rows.shrink[k / 2 % 2];
}

// The first `mine` of an item's tiles, from the ring's t-th on. s, p: scores, and weights; above: the position of the group's
// first row.
__device__ __forceinline__ void attend_tiles(float (&s)[TILE / 2], unsigned (&p)[TILE / 16][4], float (&o)[DIM / 2], Rowwise& rows,
                                             unsigned (&q)[Q_IN_REGS][4], const Work& work, const Shared& shared, int t, int mine,
                                             int above, int skip, float scale, float softcap, int thread, int group,
                                             int quarter, int lane) {
    auto scores = [&](int j) {
        const int stage = (t + j) % STAGES;
        mbarrier_wait(shared.k_full + stage, (t + j) / STAGES);
        multiply_keys(s, q, shared.q, skip, shared.k + stage * TILE_BYTES);
    };
    auto values = [&](int j) {
        const int stage = (t + j) % STAGES;
        multiply_values(o, p, shared.v + stage * TILE_BYTES);
    };
    auto weigh = [&](int j) {
        const int from = (work.first() + j) * TILE;
        const bool masked = from + TILE - 1 > above || (WINDOW && from + WINDOW <= above + 63);
        rows.weigh(s, above + quarter * 16 + lane / 4, from, masked, scale, softcap);
    };
    if (mine) {
        scores(0);
        wgmma_wait<0>();
        fence_registers(s);
        release_stage(shared.k_empty + t % STAGES);
        weigh(0);
        pack(p, s);
    }
    for (int j = 1; j < mine; j++) {
        scores(j);
        mbarrier_wait(shared.v_full + (t + j - 1) % STAGES, (t + j - 1) / STAGES);
        values(j - 1);
        wgmma_wait<1>();
        fence_registers(s);
        release_stage(shared.k_empty + (t + j) % STAGES);
        weigh(j);
        wgmma_wait<0>();
        fence_registers(o);
        release_stage(shared.v_empty + (t + j - 1) % STAGES);
        shrink(o, rows);
        pack(p, s);
    }
    if (Q_SHARED) release_stage(shared.q_empty);
    if (mine) {
        const int last = t + mine - 1, stage = last % STAGES, valid = work.length - (work.first() + mine - 1) * TILE;
        mbarrier_wait(shared.v_full + stage, last / STAGES);
        if (valid < TILE) {
            clear_rest(shared.v, stage, valid, thread);
            block_sync<128>(group + 1);
        }
        values(mine - 1);
        wgmma_wait<0>();
        fence_registers(o);
        release_stage(shared.v_empty + stage);
    }
}

// Tiles that a group's rows do not see.
__device__ __forceinline__ void release_tiles(const Shared& shared, int t, int mine, int tiles) {
    for (int j = mine; j < tiles; j++) {
        const int stage = (t + j) % STAGES;
        mbarrier_wait(shared.k_full + stage, (t + j) / STAGES);
        release_stage(shared.k_empty + stage);
        mbarrier_wait(shared.v_full + stage, (t + j) / STAGES);
        release_stage(shared.v_empty + stage);
    }
}

// A row's, over the lanes that have its quarters.
__device__ __forceinline__ float whole_sum(const Rowwise& rows, int h, const float* sinks, int head, float scale) {
    float sum = rows.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (SINKS) sum += exp2_approx(sinks[head] * LOG2_E - rows.top[h] * (SOFTCAP ? 1 : scale));
    return sum;
}

// A group of warps: its 64 rows of each of the block's items.
__device__ __forceinline__ void attend(const int* items, int count, const Shared& shared, T* out, const float* sinks, float scale,
                                       float softcap, int thread, int warp, int lane) {
    const int group = warp / 4 - 1, quarter = warp % 4;
    int t = 0, n = 0;
    for (int i; (i = pick(n)) < count * HEADS; n++) {
        const Work work(items, i / HEADS);
        const int head = i % HEADS, skip = group * 64, above = work.position + skip;
        // Tiles that this group's rows see; the block's others are only handed back.
        const int tiles = work.stop() - work.first();
        const int mine = skip >= work.rows ? 0 : min((above + 63) / TILE + 1 - work.first(), tiles);
        unsigned q[Q_IN_REGS][4];
        mbarrier_wait(shared.q_full, n);
#pragma unroll
        for (int k = 0; k < Q_IN_REGS; k++) {
            int row = skip + quarter * 16 + lane % 16, vec = k % 4 * 2 + lane / 16;
            ldmatrix(q[k], shared.q + (k / 4 * ROWS + row) * 128 + (vec ^ row % 8) * 16);
        }
        if (!Q_SHARED) release_stage(shared.q_empty);
        float s[TILE / 2], o[DIM / 2] = {};
        unsigned p[TILE / 16][4];
        Rowwise rows = {{MINUS_INFINITY, MINUS_INFINITY}, {0, 0}};
        attend_tiles(s, p, o, rows, q, work, shared, t, mine, above, skip, scale, softcap, thread, group, quarter, lane);
        release_tiles(shared, t, mine, tiles);
        t += tiles;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = whole_sum(rows, h, sinks, head, scale);
            const float by = sum > 0 ? 1 / sum : 0;
            const int row = skip + quarter * 16 + lane / 4 + h * 8;
            T* to = out + (long long)(work.row + row) * HEADS * DIM + head * DIM;
#pragma unroll
            for (int k = 0; k < DIM; k += 32) {
                unsigned x[4] = {};  // where a head ends in the middle of 32 elements, half of them
#pragma unroll
                for (int j = 0; j < 4 && k + j * 8 < DIM; j++)
                    x[j] = pack<T>(o[k / 2 + j * 4 + h * 2] * by, o[k / 2 + j * 4 + h * 2 + 1] * by);
                exchange_quads(x);
                const bool whole = DIM % 32 == 0 || k + lane % 4 * 8 < DIM;
                if (row < work.rows && whole) *(uint4*)(to + k + lane % 4 * 8) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(384, 1)
prefill(const __grid_constant__ TensorMap of_q, const __grid_constant__ TensorMap of_k, const __grid_constant__ TensorMap of_v,
        const int* items, int count, const int* tables, int table_row, T* out, const float* sinks, float scale, float softcap) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 memory[];
    __shared__ alignas(8) Barrier q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    const unsigned q_at = (smem_address(memory) + 1023) / 1024 * 1024, k_at = q_at + Q_BYTES, v_at = k_at + STAGES * TILE_BYTES;
    const Shared shared = {q_at, k_at, v_at, &q_full, &q_empty, k_full, k_empty, v_full, v_empty};
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    launch_dependents();
    if (thread == 0) {
        mbarrier_init(&q_full, 1), mbarrier_init(&q_empty, 8);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(k_full + s, 1), mbarrier_init(v_full + s, 1);
            mbarrier_init(k_empty + s, 8), mbarrier_init(v_empty + s, 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    grid_wait();
    if (warp < 4) {
        set_registers<24>(false);
        if (warp) return;
        return load_items(of_q, of_k, of_v, items, count, tables, table_row, shared, lane);
    }
    set_registers<240>(true);
    attend(items, count, shared, out, sinks, scale, softcap, thread, warp, lane);
#endif
}
