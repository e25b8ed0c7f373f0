// x becomes its sum over the group: `count` vectors of V elements. See barrier.cuh.
#include "barrier.cuh"

// Every rank reads everything.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
one_shot(T* x, const Table* table, int rank, int count) {
    Call call = begin_call(table, rank);
    Vector *y = (Vector*)x, *mine = (Vector*)call.mine;
    int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
    strided<4>(first, count, stride, [&](int i) { return y[i]; }, [&](int i, const Vector& p) { mine[i] = p; });
    barrier(call, 2);
    strided<AHEAD>(first, count, stride, [&](int i) { return parts(call, i); },
                [&](int i, const Parts& p) { y[i] = total(p); });
    end_call(call);
}

// Each rank adds up one share and leaves the sum in place of its own input, which no other rank reads; then all read
// all shares. count is a multiple of SIZE.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
two_shot(T* x, const Table* table, int rank, int count) {
    Call call = begin_call(table, rank);
    Vector *y = (Vector*)x, *mine = (Vector*)call.mine;
    int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS, share = count / SIZE;
    auto store = [&](Vector* to, int i, const Parts& p) {
#pragma unroll
        for (int r = 0; r < SIZE; r++) to[r * share + i] = p.of[r];
    };
    auto own = [&](int i) {
        Parts p;
#pragma unroll
        for (int r = 0; r < SIZE; r++) p.of[r] = y[r * share + i];
        return p;
    };
    auto sums = [&](int i) {
        Parts p;
#pragma unroll
        for (int r = 0; r < SIZE; r++) p.of[r] = ((const Vector*)call.slots[r])[r * share + i];
        return p;
    };
    strided<1>(first, share, stride, own, [&](int i, const Parts& p) { store(mine, i, p); });
    barrier(call, 1);
    Vector* part = mine + rank * share;
    strided<AHEAD>(first, share, stride, [&](int i) { return parts(call, rank * share + i); },
                [&](int i, const Parts& p) { part[i] = total(p); });
    barrier(call, 2);
    strided<1>(first, share, stride, sums, [&](int i, const Parts& p) { store(y, i, p); });
    end_call(call);
}
