// y [routed, I]: rows of x [tokens, I] in the order of group.cu, TOP routed tokens a token. A warp has a routed token.
// Places that no routed token of these EXPERTS has stay as they are.

constexpr int VECTORS = I / 8, PER = (VECTORS + 31) / 32, HELD = PER < 8 ? PER : 8;  // HELD: loads at once

extern "C" __global__ void __launch_bounds__(WARPS * 32)
gather_pairs(const T* x, const int* order, const int* ends, T* y, int pairs) {
    const int place = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    grid_wait();
    launch_dependents();
    if (place >= pairs) return;
    const int last = ends[EXPERTS], pair = order[place];  // both under way at once
    if (place >= last) return;
    const uint4* const from = (const uint4*)(x + (long long)(pair / TOP) * I);
    uint4* const to = (uint4*)(y + (long long)place * I);
#pragma unroll 1
    for (int first = lane; first < VECTORS; first += HELD * 32) {
        uint4 held[HELD];
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (first + i * 32 < VECTORS) held[i] = from[first + i * 32];
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (first + i * 32 < VECTORS) to[first + i * 32] = held[i];
    }
}
