// out [outputs, I] of a W in packed tiles of a quantised format, at the speed of memory. A warp takes RUN packed tiles
// side by side.
#include "mma.cuh"
#include "half2.cuh"
#include FORMAT

constexpr int K_TILES = I / SPAN;

extern "C" __global__ void dequantize(const unsigned char* weight, T* out, int outputs) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int begin = (blockIdx.x * (blockDim.x / 32) + warp) * RUN, n_tile = blockIdx.y;
    const PackedTiles from(weight + ((long long)n_tile * K_TILES + begin) * PACKED_BYTES, lane);
    PackedTile packed_tiles[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++)
        if (begin + i < K_TILES) packed_tiles[i] = from.stream(i);
    grid_wait();  // without launch_dependents(): what follows may read weights before it waits
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        if (begin + i >= K_TILES) break;
#pragma unroll
        for (int p = 0; p < SPAN / 32; p++) {
            unsigned a[2][4];
            weights<T>(packed_tiles[i], 2 * p, a[0]);
            weights<T>(packed_tiles[i], 2 * p + 1, a[1]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int output = n_tile * 16 + lane / 4 + h * 8;
                if constexpr (BY_RUNS) {  // four of its inputs, and those 8 above
                    T* const to = out + (long long)output * I + (begin + i) * SPAN + p / 2 * 64 + lane % 4 * 16 + p % 2 * 4;
                    if (output < outputs) {
                        *(uint2*)to = make_uint2(a[0][h], a[1][h]);
                        *(uint2*)(to + 8) = make_uint2(a[0][2 + h], a[1][2 + h]);
                    }
                    continue;
                }
                unsigned row[4] = {a[0][h], a[0][2 + h], a[1][h], a[1][2 + h]};  // pairs of its runs of eight inputs
                exchange_quads(row);
                if (output < outputs)
                    *(uint4*)(out + (long long)output * I + (begin + i) * SPAN + p * 32 + lane % 4 * 8) =
                        make_uint4(row[0], row[1], row[2], row[3]);
            }
        }
    }
}
