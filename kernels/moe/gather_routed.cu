// y [routed, I]: rows of x [tokens, I] in the order of group.cu, TOP routed tokens a token. A warp has a routed token.
// Places that no routed token of these EXPERTS has stay as they are.

constexpr int VECTORS = I / 8, PER = (VECTORS + 31) / 32, LOADS = PER < 8 ? PER : 8;  // LOADS: loads at once

extern "C" __global__ void __launch_bounds__(WARPS * 32)
gather_routed(const T* x, const int* sorted_ids, const int* offsets, T* y, int routed) {
    const int position = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    grid_wait();
    launch_dependents();
    if (position >= routed) return;
    const int last = offsets[EXPERTS], routed_id = sorted_ids[position];  // both under way at once
    if (position >= last) return;
    const uint4* const from = (const uint4*)(x + (long long)(routed_id / TOP) * I);
    uint4* const to = (uint4*)(y + (long long)position * I);
#pragma unroll 1
    for (int first = lane; first < VECTORS; first += LOADS * 32) {
        uint4 loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            if (first + i * 32 < VECTORS) loaded[i] = from[first + i * 32];
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            if (first + i * 32 < VECTORS) to[first + i * 32] = loaded[i];
    }
}
