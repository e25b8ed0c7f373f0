// y [rows, outputs] = x [rows, I] W^T for up to 8 * TILES rows by tensor cores, at the speed at which W is read.
//
// A block computes 16 * HIGH outputs. Its 8 warps take turns along the inputs, 64 at a time, and add up in the end. W goes
// from memory to registers as the instruction wants it: a sum's order is free, so that inputs k and k + 8 of its
// fragments may stand for whichever inputs a lane has, as long as W and x agree. Rows from `rows` on repeat the last one.
// The first AHEAD weights of a warp are asked for before the kernel's predecessor has ended.

constexpr int WARPS = 8;
constexpr int STEPS = I / (64 * WARPS);
constexpr int X_AHEAD = 2;

struct Piece {  // 8 elements
    unsigned u[4];
};

// Read once: it need not displace anything in the first-level cache.
__device__ inline Piece stream(const T* from) {
    Piece y;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.u[0]), "=r"(y.u[1]), "=r"(y.u[2]), "=r"(y.u[3])
                 : "l"(from));
    return y;
}

__device__ inline Piece fetch(const T* from) {
    Piece y;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.u[0]), "=r"(y.u[1]), "=r"(y.u[2]), "=r"(y.u[3])
                 : "l"(from));
    return y;
}

template <class E>
__device__ inline void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1);
#define MULTIPLY(type, name)                                                                                             \
    template <>                                                                                                          \
    __device__ inline void multiply<type>(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,             \
                                          unsigned b0, unsigned b1) {                                                    \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, "                    \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                     \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                    \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                            \
    }
MULTIPLY(bf16, "bf16")
MULTIPLY(f16, "f16")

extern "C" __global__ void __launch_bounds__(256, 2)
skinny(const T* x, const T* weight, T* y, int rows, int outputs) {
    release();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int first = blockIdx.x * 16 * HIGH;
    const T* w = weight + (long long)(first + g) * I + warp * 64 + t * 8;
    Piece ring[AHEAD][HIGH][2][2];  // row g or g + 8, inputs from 0 or 32
    auto ask = [&](int slot, int step) {
#pragma unroll
        for (int m = 0; m < HIGH; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int p = 0; p < 2; p++)
                    ring[slot][m][half][p] = stream(w + (m * 16 + half * 8) * I + step * 64 * WARPS + p * 32);
    };
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
        if (u < STEPS) ask(u, u);
    wait();
    Piece xs[X_AHEAD][TILES][2];
    auto ask_x = [&](int slot, int step) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int p = 0; p < 2; p++)
                xs[slot][n][p] = fetch(x + (long long)min(n * 8 + g, rows - 1) * I + warp * 64 + t * 8 + step * 64 * WARPS + p * 32);
    };
#pragma unroll
    for (int u = 0; u < X_AHEAD; u++)
        if (u < STEPS) ask_x(u, u);
    float sum[HIGH][TILES][4] = {};
#pragma unroll 1
    for (int s = 0; s < STEPS; s += AHEAD) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (s + u >= STEPS) break;
#pragma unroll
            for (int m = 0; m < HIGH; m++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int p = 0; p < 2; p++) {
                        const unsigned *a = ring[u][m][0][p].u, *b = ring[u][m][1][p].u, *v = xs[u % X_AHEAD][n][p].u;
                        multiply<T>(sum[m][n], a[0], b[0], a[1], b[1], v[0], v[1]);
                        multiply<T>(sum[m][n], a[2], b[2], a[3], b[3], v[2], v[3]);
                    }
            if (s + u + AHEAD < STEPS) ask(u, s + u + AHEAD);
            if (s + u + X_AHEAD < STEPS) ask_x(u % X_AHEAD, s + u + X_AHEAD);
        }
    }
    __shared__ float sums[WARPS][HIGH * 16][TILES * 8 + 1];
#pragma unroll
    for (int m = 0; m < HIGH; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[warp][m * 16 + g + i / 2 * 8][n * 8 + t * 2 + i % 2] = sum[m][n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < rows * HIGH * 16; i += 256) {
        int row = i / (HIGH * 16), out = i % (HIGH * 16);
        float total = 0;
#pragma unroll
        for (int k = 0; k < WARPS; k++) total += sums[k][out][row];
        y[(long long)row * outputs + first + out] = narrow<T>(total);
    }
}
