// Which TOP of EXPERTS each token goes to, and with which weights: a router's GEMM, scores and top-k.
//
// `route` is one kernel for all of it: blocks multiply experts' rows of the router with R tokens, and the block that is
// the last of these tokens' chooses. `choose` does the second half alone, of logits that a GEMM has made. Everything is
// computed in f32.

constexpr int V = 8;  // elements of one access
constexpr int PER = (EXPERTS + 31) / 32;  // experts of a lane
constexpr float LOWEST = -3.0e38f;  // below any logit that counts; a NaN is that, too, so that ids are always valid

enum { SOFTMAX, SIGMOID };

// A warp: which of a lane's experts, as bits, are in none of the TOP_GROUPS best of GROUPS groups. A group is as good
// as its best GROUP_TOP experts together, one or two.
__device__ inline unsigned outside_groups(const float* rank) {
    constexpr int SIZE = EXPERTS / GROUPS;
    const int lane = threadIdx.x % 32;
    float value[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float first = LOWEST, second = LOWEST;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int e = lane + i * 32;
            if (e >= EXPERTS || e / SIZE != g) continue;
            second = fmaxf(second, fminf(first, rank[i]));
            first = fmaxf(first, rank[i]);
        }
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            float other = __shfl_xor_sync(0xffffffffu, first, step);
            float next = __shfl_xor_sync(0xffffffffu, second, step);
            second = fmaxf(fmaxf(second, next), fminf(first, other));
            first = fmaxf(first, other);
        }
        value[g] = GROUP_TOP == 1 ? first : first / 2 + second / 2;  // a sum of two could overflow
    }
    unsigned kept = 0, outside = 0;
#pragma unroll
    for (int k = 0; k < TOP_GROUPS; k++) {
        int at = -1;
        float best = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            if (!(kept >> g & 1) && (at < 0 || value[g] > best)) best = value[g], at = g;
        kept |= 1u << at;
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = lane + i * 32;
        if (e < EXPERTS && !(kept >> e / SIZE & 1)) outside |= 1u << i;
    }
    return outside;
}

// A warp: `logits` [EXPERTS] of one token → its ids and weights [TOP]. bias: of softmax's logits, or of sigmoid's
// scores, for the choice alone.
__device__ inline void choose_experts(const float* logits, const float* bias, int* ids, float* weights, float scale) {
    const int lane = threadIdx.x % 32;
    float score[PER], rank[PER];
    float top = LOWEST;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = lane + i * 32;
        float x = e < EXPERTS ? __ldcg(logits + e) : LOWEST;
        if (BIAS && SCORING == SOFTMAX && e < EXPERTS) x += bias[e];
        score[i] = x > LOWEST ? x : LOWEST;
        top = fmaxf(top, score[i]);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = lane + i * 32;
        if (SCORING == SIGMOID) {
            score[i] = 1 / (1 + expf(-score[i]));
            rank[i] = score[i] + (BIAS && e < EXPERTS ? bias[e] : 0.0f);
        } else {
            rank[i] = score[i];  // a logit, as exponentials may be equal where these are not
            score[i] = expf(score[i] - top);
        }
        if (e < EXPERTS) sum += score[i];
        if (!(rank[i] > LOWEST)) rank[i] = LOWEST;
    }
    sum = warp_sum(sum);
    float mine = 0, chosen = 0;  // lane k has the k-th
    int id = 0;
    unsigned taken = GROUPS > 1 ? outside_groups(rank) : 0;
#pragma unroll 1
    for (int k = 0; k < TOP; k++) {
        float best = __int_as_float(0xff800000), value = 0;
        int at = 1 << 30;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int e = lane + i * 32;
            if (e < EXPERTS && !(taken >> i & 1) && rank[i] > best) best = rank[i], value = score[i], at = e;
        }
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            float other = __shfl_xor_sync(0xffffffffu, best, step);
            float its = __shfl_xor_sync(0xffffffffu, value, step);
            int where = __shfl_xor_sync(0xffffffffu, at, step);
            if (other > best || (other == best && where < at)) best = other, value = its, at = where;
        }
        if (at % 32 == lane) taken |= 1u << at / 32;
        if (lane == k) mine = value, id = at;
        chosen += value;
    }
    if (lane >= TOP) return;
    if (SCORING == SIGMOID)
        mine = NORMALISE ? mine / (chosen + 1e-20f) : mine;
    else
        mine /= NORMALISE ? chosen : sum;
    ids[lane] = id, weights[lane] = mine * scale;
}

#include "mma.cuh"

// How many experts a block has. For small batches a warp has one, and lanes share its inputs; of R tokens tensor cores
// have 16 experts, and warps share the inputs.
constexpr bool MATMUL = R == 8;
constexpr int OF_BLOCK = MATMUL ? 16 : WARPS;

// logits of the block's experts and of tokens first to first + R - 1, by a warp for one expert.
__device__ inline void multiply(const T* x, const T* router, float* logits, int rows, int first) {
    constexpr int STEPS = (HIDDEN / V + 31) / 32, AHEAD = STEPS < 8 ? STEPS : 8;
    const int lane = threadIdx.x % 32, expert = blockIdx.x * OF_BLOCK + threadIdx.x / 32;
    const uint4* row = (const uint4*)(router + (long long)min(expert, EXPERTS - 1) * HIDDEN) + lane;
    uint4 ring[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) ring[u] = u * 32 + lane < HIDDEN / V ? __ldg(row + u * 32) : uint4{0, 0, 0, 0};
    grid_wait();
    float sums[R] = {};
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (s + u >= STEPS) break;
            const int at = (s + u) * 32 + lane;
            const uint4 w = ring[u];
            const int next = at + AHEAD * 32;
            ring[u] = next < HIDDEN / V ? __ldg(row + next - lane) : uint4{0, 0, 0, 0};
            const unsigned a[4] = {w.x, w.y, w.z, w.w};
            if (at >= HIDDEN / V) continue;
#pragma unroll
            for (int r = 0; r < R; r++) {
                const uint4 of_x = ((const uint4*)(x + (long long)min(first + r, rows - 1) * HIDDEN))[at];
                const unsigned b[4] = {of_x.x, of_x.y, of_x.z, of_x.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 p = unpack<T>(a[j]), q = unpack<T>(b[j]);
                    sums[r] += p.x * q.x;
                    sums[r] += p.y * q.y;
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        float total = warp_sum(sums[r]);
        if (lane == 0 && expert < EXPERTS && first + r < rows) logits[(long long)(first + r) * EXPERTS + expert] = total;
    }
}

// The router's GEMM by tensor cores. A lane loads 8 elements side by side of experts lane / 4 and 8 below, and of token
// lane / 4: for two matmuls of 16 inputs, whose order means nothing to a sum.
__device__ inline void multiply_tiles(const T* x, const T* router, float* logits, int rows, int first) {
    constexpr int STEPS = (HIDDEN + 32 * WARPS - 1) / (32 * WARPS), AHEAD = STEPS < 4 ? STEPS : 4;
    __shared__ float parts[WARPS][R][OF_BLOCK + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, expert = blockIdx.x * OF_BLOCK;
    const T* const upper = router + (long long)min(expert + group, EXPERTS - 1) * HIDDEN;
    const T* const lower = router + (long long)min(expert + group + 8, EXPERTS - 1) * HIDDEN;
    const T* const token = x + (long long)min(first + group, rows - 1) * HIDDEN;
    auto load = [&](const T* from, int step) {
        const int at = (step * WARPS + warp) * 32 + lane % 4 * V;
        return at < HIDDEN ? *(const uint4*)(from + at) : uint4{0, 0, 0, 0};
    };
    uint4 above[AHEAD], below[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) above[u] = load(upper, u), below[u] = load(lower, u);
    grid_wait();
    float sums[4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; s += AHEAD) {
        uint4 of_x[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) of_x[u] = load(token, s + u);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (s + u >= STEPS) break;
            const uint4 a = above[u], b = below[u];
            if (s + AHEAD + u < STEPS) above[u] = load(upper, s + AHEAD + u), below[u] = load(lower, s + AHEAD + u);
            mma<T>(sums, {a.x, b.x, a.y, b.y}, of_x[u].x, of_x[u].y);
            mma<T>(sums, {a.z, b.z, a.w, b.w}, of_x[u].z, of_x[u].w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) parts[warp][lane % 4 * 2 + i % 2][group + i / 2 * 8] = sums[i];
    __syncthreads();
    if (threadIdx.x >= R * OF_BLOCK) return;
    const int r = threadIdx.x / OF_BLOCK, e = threadIdx.x % OF_BLOCK;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += parts[w][r][e];
    if (expert + e < EXPERTS && first + r < rows) logits[(long long)(first + r) * EXPERTS + expert + e] = total;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
route(const T* x, const T* router, const float* bias, float* logits, int* ids, float* weights, int* arrived, int rows,
      float scale) {
    __shared__ bool last;
    const int warp = threadIdx.x / 32, first = blockIdx.y * R;
    launch_dependents();  // experts' weights may be asked for while this chooses
    if constexpr (MATMUL)
        multiply_tiles(x, router, logits, rows, first);
    else
        multiply(x, router, logits, rows, first);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived + blockIdx.y, 1) == (int)gridDim.x - 1;
        if (last) arrived[blockIdx.y] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    for (int r = first + warp; r < min(first + R, rows); r += WARPS)
        choose_experts(logits + (long long)r * EXPERTS, bias, ids + (long long)r * TOP, weights + (long long)r * TOP, scale);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
choose(const float* logits, const float* bias, int* ids, float* weights, int rows, float scale) {
    grid_wait();
    launch_dependents();
    const int r = blockIdx.x * WARPS + threadIdx.x / 32;
    if (r < rows)
        choose_experts(logits + (long long)r * EXPERTS, bias, ids + (long long)r * TOP, weights + (long long)r * TOP, scale);
}
