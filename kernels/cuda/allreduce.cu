// x becomes its sum over the group: `count` vectors of V elements. See peers.cuh.
#include "peers.cuh"

typedef Vec<T, V> Piece;

// Every rank reads everything.
extern "C" __global__ void __launch_bounds__(THREADS) one_shot(T* x, const Table* table, int rank, int count) {
    Call call = begin(table, rank);
    Piece *y = (Piece*)x, *mine = (Piece*)call.mine;
    int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
    for (int i = first; i < count; i += stride) mine[i] = y[i];
    meet(call, 2);
    for (int i = first; i < count; i += stride) y[i] = total<Piece>(call, i);
    end(call);
}

// Each rank adds up one share and leaves the sum in place of its own input, which nobody else reads; then all read all
// shares. count is a multiple of SIZE.
extern "C" __global__ void __launch_bounds__(THREADS) two_shot(T* x, const Table* table, int rank, int count) {
    Call call = begin(table, rank);
    Piece *y = (Piece*)x, *mine = (Piece*)call.mine;
    int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS, share = count / SIZE;
    for (int i = first; i < share; i += stride)
#pragma unroll
        for (int r = 0; r < SIZE; r++) mine[r * share + i] = y[r * share + i];
    meet(call, 1);
    for (int i = first; i < share; i += stride)
        mine[rank * share + i] = total<Piece>(call, rank * share + i);
    meet(call, 2);
    for (int i = first; i < share; i += stride)
#pragma unroll
        for (int r = 0; r < SIZE; r++) y[r * share + i] = ((const Piece*)call.slots[r])[r * share + i];
    end(call);
}
