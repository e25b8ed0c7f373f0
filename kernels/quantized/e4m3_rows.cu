// x [rows, I] in e4m3 with a scale for each row, as e4m3_encode.cuh makes it and e4m3_wgmma.cu takes it: codes [rows, I],
// scales [rows]. A block has a row. For sm_90 and later.
#include "e4m3_encode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
e4m3_rows(const T* x, uint4* codes, float* scales) {
    const long long first = (long long)blockIdx.x * RUNS;
    grid_wait();
    launch_dependents();
    encode_row((const uint4*)x, first, codes, first, scales + blockIdx.x);
}
