// A row of I elements in e4m3 with a scale, max|x| / 448, by a block of THREADS: as e4m3_ring.cuh takes it. Numbers
// down to a 28672nd of the row's largest keep all their bits, and what smaller ones lose is nothing next to it. In each
// 16 inputs, byte 4 t + b is of input 2 t + {0, 8, 1, 9}[b], as in a run of a packed tile (e4m3_wide.cuh): the order of
// inputs means nothing to a sum.
#include "e4m3_scale.cuh"

constexpr int RUNS = I / 16, PER = (RUNS + THREADS - 1) / THREADS;  // runs of 16 inputs: of a row, and of a thread

// from, to: a row's first runs there.
__device__ inline void encode_row(const uint4* x, long long from, uint4* codes, long long to, float* scale) {
    uint4 loaded[PER][2];
    float most = 0;
    auto largest = [&](unsigned pair) {
        const float2 two = unpack<T>(pair);
        most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
    };
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int run = threadIdx.x + i * THREADS;
#pragma unroll
        for (int h = 0; h < 2; h++) loaded[i][h] = run < RUNS ? x[(from + run) * 2 + h] : uint4{};
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            largest(loaded[i][h].x), largest(loaded[i][h].y), largest(loaded[i][h].z), largest(loaded[i][h].w);
    most = block_max(most);
    const float by = e4m3_factor(most);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int run = threadIdx.x + i * THREADS;
        const uint4 low = loaded[i][0], high = loaded[i][1];
        const unsigned lows[] = {low.x, low.y, low.z, low.w}, highs[] = {high.x, high.y, high.z, high.w};
        unsigned words[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const float2 a = unpack<T>(lows[t]), b = unpack<T>(highs[t]);
            words[t] = to_e4m3x2(a.x * by, b.x * by) | to_e4m3x2(a.y * by, b.y * by) << 16;
        }
        if (run < RUNS) codes[to + run] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (threadIdx.x == 0) *scale = most / 448;
}
