// The experts of a small batch: each routed token reads that expert's weights as fast as memory gives them. w13
// [experts, 2 INNER, HIDDEN] is gate over up, without GATED [experts, INNER, HIDDEN] up alone; w2 [experts, HIDDEN,
// INNER]. Routed tokens go along the grid's first axis, so that tokens with the same expert read the same rows at about
// the same time, and all but one from the second-level cache.
//
// With PART this rank has `experts` of the router's experts, from `first` on: routed tokens of others read no weights
// and count as 0.

constexpr int V = 8;  // elements of one access
#include "stream.cuh"

__device__ inline float dot(const Access& w, const uint4& x, float sum) {
    const unsigned b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 p = unpack<T>(w.u[j]), q = unpack<T>(b[j]);
        sum += p.x * q.x;
        sum += p.y * q.y;
    }
    return sum;
}

// h [routed, INNER] = weight of the routed token * act(gate) * up, or weight * act(up); a warp makes one element of it.
// The router's ids are what the kernel before has written, so that no weight can be asked for ahead of it.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
expert_up(const T* x, const int* ids, const float* weights, const T* w13, T* h, int first, int experts) {
    constexpr int STEPS = (HIDDEN / V + 31) / 32, MOST = GATED ? 4 : 8, AHEAD = STEPS < MOST ? STEPS : MOST;
    const int lane = threadIdx.x % 32, routed_id = blockIdx.x, o = blockIdx.y * WARPS + threadIdx.x / 32;
    grid_wait();
    launch_dependents();
    const int expert = ids[routed_id] - (PART ? first : 0);
    if (PART && (unsigned)expert >= (unsigned)experts) {
        if (lane == 0) h[(long long)routed_id * INNER + o] = from_float<T>(0.0f);
        return;
    }
    constexpr int ROWS = GATED ? 2 : 1;  // of w13 that an element needs
    const T* row = w13 + ((long long)expert * ROWS * INNER + o) * HIDDEN + lane * V;
    const T* token = x + (long long)(routed_id / TOP) * HIDDEN + lane * V;
    Access ring[AHEAD][ROWS];
    auto ask = [&](int u, int step) {
        if (step * 32 + lane < HIDDEN / V)
#pragma unroll
            for (int r = 0; r < ROWS; r++) ring[u][r] = stream(row + (long long)r * INNER * HIDDEN + step * 32 * V);
    };
#pragma unroll
    for (int u = 0; u < AHEAD; u++) ask(u, u);
    float sums[ROWS] = {};
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if ((s + u) * 32 + lane < HIDDEN / V) {
                const uint4 at = *(const uint4*)(token + (s + u) * 32 * V);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r] = dot(ring[u][r], at, sums[r]);
            }
            ask(u, s + u + AHEAD);
        }
    }
    const float g = warp_sum(sums[0]), y = GATED ? warp_sum(sums[ROWS - 1]) : 1;
    if (lane == 0) h[(long long)routed_id * INNER + o] = from_float<T>(gated<T, ACT>(g, y) * weights[routed_id]);
}

// y [tokens, HIDDEN], the sum over each token's experts; a warp makes one element of it. The ids are older than the
// kernel before, which lets this one start when it has waited itself: the first weights are asked for ahead of it.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
expert_down(const T* h, const int* ids, const T* w2, T* y, int first, int experts) {
    constexpr int ROW = INNER / V, STEPS = (TOP * ROW + 31) / 32, AHEAD = STEPS < 8 ? STEPS : 8;
    const int lane = threadIdx.x % 32, token = blockIdx.x, o = blockIdx.y * WARPS + threadIdx.x / 32;
    const int id = lane < TOP ? ids[token * TOP + lane] - (PART ? first : 0) : 0;
    // Access `at` of the TOP rows that this warp reads, one after the other.
    auto weight = [&](int at) {
        const int k = at / ROW;  // of all lanes, as shuffles need them
        const int expert = __shfl_sync(0xffffffffu, id, k < TOP ? k : 0);
        Access w{};
        if (at < TOP * ROW && (!PART || (unsigned)expert < (unsigned)experts)) w = stream(w2 + ((long long)expert * HIDDEN + o) * INNER + (at - k * ROW) * V);
        return w;
    };
    Access ring[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) ring[u] = weight(u * 32 + lane);
    grid_wait();
    launch_dependents();
    const T* token_h = h + (long long)token * TOP * INNER;
    float sum = 0;
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int at = (s + u) * 32 + lane;
            if (at < TOP * ROW) sum = dot(ring[u], *(const uint4*)(token_h + at * V), sum);
            ring[u] = weight(at + AHEAD * 32);
        }
    }
    const float total = warp_sum(sum);
    if (lane == 0) y[(long long)token * HIDDEN + o] = from_float<T>(total);
}
