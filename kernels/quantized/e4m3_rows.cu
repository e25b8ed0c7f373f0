// x [rows, I] in e4m3 with a scale for each 128 inputs of a row, max|x| / 448, as e4m3_wgmma.cu takes it: codes [rows, I],
// scales [I / 128, pitch]. In each 16 inputs, byte 4 t + b is of input 2 t + {0, 8, 1, 9}[b], as in a run of a piece
// (e4m3_wide.cuh): the order of inputs means nothing to a sum. Eight lanes make 128 codes. For sm_90 and later.

constexpr int WARPS = 4;

// Of eight lanes.
__device__ inline float group_max(float x) {
#pragma unroll
    for (int step = 4; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
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
e4m3_rows(const T* x, uint4* codes, float* scales, int rows, int pitch) {
    const int lane = threadIdx.x % 32, units = I / 128, count = rows * units;
    const int unit = (blockIdx.x * WARPS + threadIdx.x / 32) * 4 + lane / 8;
    const long long run = (long long)min(unit, count - 1) * 8 + lane % 8;  // of 16 inputs
    grid_wait();
    launch_dependents();
    const uint4 low = ((const uint4*)x)[run * 2], high = ((const uint4*)x)[run * 2 + 1];
    const unsigned lows[] = {low.x, low.y, low.z, low.w}, highs[] = {high.x, high.y, high.z, high.w};
    float2 a[4], b[4];
    float most = 0;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        a[t] = unpack<T>(lows[t]), b[t] = unpack<T>(highs[t]);
        most = fmaxf(most, fmaxf(fmaxf(fabsf(a[t].x), fabsf(a[t].y)), fmaxf(fabsf(b[t].x), fabsf(b[t].y))));
    }
    most = group_max(most);
    if (unit >= count) return;
    const float by = most > 0 ? 448 / most : 0;
    unsigned words[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
        words[t] = e4m3_pair(a[t].x * by, b[t].x * by) | e4m3_pair(a[t].y * by, b[t].y * by) << 16;
    codes[run] = make_uint4(words[0], words[1], words[2], words[3]);
    if (lane % 8 == 0) scales[(long long)(unit % units) * pitch + unit / units] = most / 448;
}
