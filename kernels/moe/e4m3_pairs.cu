// Rows of x in e4m3 for routed tokens, in the order of group.cu: as e4m3_encode.cuh makes them and
// e4m3_experts.cu takes them. codes [routed, I] and scales [routed]; by_place [routed]: the routed tokens' weights. x
// is [tokens, I], TOP routed tokens a token; with TOP of 0 it is [routed, I] in that order already. A block has a
// routed token. Places that no routed token of these EXPERTS has stay as they are. For sm_90 and later.
#include "e4m3_encode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
e4m3_pairs(const T* x, const int* order, const int* ends, const float* weights, uint4* codes, float* scales, float* by_place) {
    const int place = blockIdx.x;
    grid_wait();
    launch_dependents();
    const int last = ends[EXPERTS], pair = order[place];  // both under way at once
    if (place >= last) return;
    if (threadIdx.x == 0) by_place[place] = weights[pair];
    const long long row = TOP ? pair / max(TOP, 1) : place;
    encode_row((const uint4*)x, row * RUNS, codes, (long long)place * RUNS, scales + place);
}
