// sum_add_rms_norm of norm.cu for linears that take e4m3: codes [rows, N] and scales [rows] of what it would write, as
// e4m3_encode.cuh makes them. V is 8, N a multiple of 16. For sm_90 and later.
#include "e4m3_scale.cuh"
#include "row.cuh"

// Codes of four elements.
__device__ inline unsigned codes_of(const T* x, float by) {
    return to_e4m3x2(to_float(x[0]) * by, to_float(x[1]) * by) | to_e4m3x2(to_float(x[2]) * by, to_float(x[3]) * by) << 16;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sum_add_rms_norm_e4m3(const T* terms, const T* other, int pitch, T* residual, const T* weight, uint2* codes,
                      float* scales, float eps) {
    launch_dependents();
    const Weights weights(weight);
    grid_wait();
    Vector row[PER];
    add_row<PARTS == 2, TERMS>(row, terms, other, residual, pitch);
    const float scale = inverse_rms(row, eps);
    float most = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        row[i] = in_row(i) ? scaled(row[i], scale, weights.w[i]) : Vector{};
#pragma unroll
        for (int j = 0; j < V; j++) most = fmaxf(most, fabsf(to_float(row[i].x[j])));
    }
    most = block_max(most);
    const float by = e4m3_factor(most);
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        // Codes of 16 inputs are interleaved (e4m3_encode.cuh), and a lane holds 8: the even lane stores those of both lanes'
        // first four inputs, the odd lane those of their last four.
        const unsigned first = codes_of(row[i].x, by), last = codes_of(row[i].x + 4, by);
        const unsigned theirs = __shfl_xor_sync(0xffffffffu, odd ? first : last, 1);
        const unsigned low = odd ? theirs : first, high = odd ? last : theirs;
        const uint2 both = make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
        if (in_row(i)) codes[(long long)blockIdx.x * (N / V) + threadIdx.x + i * THREADS] = both;
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = most / 448;
}
