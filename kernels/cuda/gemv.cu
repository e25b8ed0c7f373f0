// y [R, outputs] = x [R, I] W^T for one to a few rows: a warp reads OUTS rows of W as fast as memory gives them.
//
// The first AHEAD vectors of each are asked for before the kernel's predecessor has ended: weights do not change. I is
// a multiple of a warp's access, outputs one of what a block computes. Shared memory: x, R * I elements. With GATED, W is
// a gate matrix over an up matrix, a warp's two rows are one of each, and y = silu(gate) * up.

constexpr int V = 8;                 // elements of one access
constexpr int STEPS = I / (32 * V);  // accesses of a warp to a row

// One access as it comes: single elements would take a register each.
struct Piece {
    unsigned u[4];
};

// Weights are read once: they need not displace anything in the first-level cache.
__device__ inline Piece stream(const Piece* from) {
    Piece y;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.u[0]), "=r"(y.u[1]), "=r"(y.u[2]), "=r"(y.u[3])
                 : "l"(from));
    return y;
}

extern "C" __global__ void __launch_bounds__(256, 2) gemv(const T* x, const T* weight, T* y, int outputs) {
    extern __shared__ uint4 memory[];
    uint4* xs = memory;
    int lane = threadIdx.x % 32;
    int warp = blockIdx.x * 8 + threadIdx.x / 32, first = GATED ? warp : warp * OUTS;
    const Piece* rows = (const Piece*)(weight + (long long)first * I) + lane;
    const long long apart = GATED ? (long long)outputs / 2 * (I / V) : I / V;  // of a warp's rows
    Piece ring[AHEAD][OUTS];
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
#pragma unroll
        for (int o = 0; o < OUTS; o++)
            if (u < STEPS) ring[u][o] = stream(rows + o * apart + u * 32);
    wait();
    release();
    for (int i = threadIdx.x; i < R * I / V; i += 256) xs[i] = ((const uint4*)x)[i];
    __syncthreads();
    float sum[OUTS][R] = {};
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (s + u >= STEPS) break;
#pragma unroll
            for (int r = 0; r < R; r++) {
                uint4 at = xs[r * (I / V) + (s + u) * 32 + lane];
                unsigned a[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 p = pair<T>(a[j]);
#pragma unroll
                    for (int o = 0; o < OUTS; o++) {
                        float2 w = pair<T>(ring[u][o].u[j]);
                        sum[o][r] += p.x * w.x;
                        sum[o][r] += p.y * w.y;
                    }
                }
            }
            if (s + u + AHEAD < STEPS) {
#pragma unroll
                for (int o = 0; o < OUTS; o++) ring[u][o] = stream(rows + o * apart + (s + u + AHEAD) * 32);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        float total[OUTS];
#pragma unroll
        for (int o = 0; o < OUTS; o++) total[o] = warp_sum(sum[o][r]);
        if (lane) continue;
        if (GATED)
            y[(long long)r * (outputs / 2) + first] = narrow<T>(gated<T>(total[0], total[OUTS - 1]));
        else
#pragma unroll
            for (int o = 0; o < OUTS; o++) y[(long long)r * outputs + first + o] = narrow<T>(total[o]);
    }
}
