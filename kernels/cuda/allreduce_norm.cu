// residual += the sum of x over the group; x = norm(residual). Rows of N elements, a block to a row. See peers.cuh.
#include "peers.cuh"
#include "row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
one_shot_add_norm(T* x, T* residual, const T* weight, const Table* table, int rank, int rows, float eps) {
    Call call = begin(table, rank);
    for (int row = blockIdx.x; row < rows; row += gridDim.x)
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int at = threadIdx.x + i * THREADS;
            if (at >= N / V) break;
            ((Piece*)call.mine)[row * (N / V) + at] = ((Piece*)x)[row * (N / V) + at];
        }
    meet(call, 2);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Piece* stream = (Piece*)residual + row * (N / V);
        Piece sum[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int at = threadIdx.x + i * THREADS;
            if (at >= N / V) break;
            // Rounded before it is added, as the two operations one after the other do.
            Piece p = total<Piece>(call, row * (N / V) + at), q = stream[at];
#pragma unroll
            for (int j = 0; j < V; j++) sum[i].x[j] = narrow<T>(wide(p.x[j]) + wide(q.x[j]));
            stream[at] = sum[i];
        }
        __syncthreads();
        finish(sum, weight, x + (long long)row * N, eps);
    }
    end(call);
}
