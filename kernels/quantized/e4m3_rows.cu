// x [rows, I] in e4m3 with a scale for each 128 inputs of a row, max|x| / 448, as e4m3_wgmma.cu takes it: codes [rows, I],
// scales [I / 128, pitch]. In each 16 inputs, byte 4 t + b is of input 2 t + {0, 8, 1, 9}[b], as in a piece's words
// (e4m3.cuh): the order of inputs means nothing to a sum. A warp makes 128 codes. For sm_90 and later.

constexpr int WARPS = 8;

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Rounded to nearest even; what is larger than 448 becomes that, NaN stays NaN.
__device__ inline unsigned e4m3_pair(float first, float second) {
    unsigned short y = 0;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(second), "f"(first));
#endif
    return y;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
e4m3_rows(const T* x, unsigned* codes, float* scales, int rows, int pitch) {
    const int lane = threadIdx.x % 32, units = I / 128;
    const long long unit = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    grid_wait();
    launch_dependents();
    if (unit >= (long long)rows * units) return;
    const int row = unit / units, column = unit % units;
    const unsigned* const from = (const unsigned*)(x + unit * 128 + lane / 4 * 16 + lane % 4 * 2);
    const float2 low = unpack<T>(from[0]), high = unpack<T>(from[4]);  // inputs 2 t and 2 t + 8, and the next ones
    const float most = warp_max(fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
    const float by = most > 0 ? 448 / most : 0;
    codes[unit * 32 + lane] = e4m3_pair(low.x * by, high.x * by) | e4m3_pair(low.y * by, high.y * by) << 16;
    if (lane == 0) scales[(long long)column * pitch + row] = most / 448;
}
