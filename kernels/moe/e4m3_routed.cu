// Rows of x in e4m3 for routed tokens, in the order of group.cu: as e4m3_encode.cuh makes them and
// e4m3_experts.cu takes them. codes [routed, I] and scales [routed]; sorted_weights [routed]: the routed tokens'
// weights. x is [tokens, I], TOP routed tokens a token; with TOP of 0 it is [routed, I] in that order already. A block
// has a routed token. Places that no routed token of these EXPERTS has stay as they are. For sm_90 and later.
#include "e4m3_encode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
e4m3_routed(const T* x, const int* sorted_ids, const int* offsets, const float* weights, uint4* codes, float* scales, float* sorted_weights) {
    const int position = blockIdx.x;
    grid_wait();
    launch_dependents();
    const int last = offsets[EXPERTS], routed_id = sorted_ids[position];  // both under way at once
    if (position >= last) return;
    if (threadIdx.x == 0) sorted_weights[position] = weights[routed_id];
    const long long row = TOP ? routed_id / max(TOP, 1) : position;
    encode_row((const uint4*)x, row * RUNS, codes, (long long)position * RUNS, scales + position);
}
