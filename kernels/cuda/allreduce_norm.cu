// residual += the sum of x over the group; x = norm(residual). Rows of N elements, a block to a row. See peers.cuh.
#include "peers.cuh"
#include "row.cuh"

constexpr int ROW = N / V;
constexpr int SHARE = (ROW + SIZE - 1) / SIZE;  // vectors of a row that a rank adds up; the last ranks may have fewer

__device__ inline int own_rows(int rows) { return (rows - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x; }

// The first vector of the block's row number i.
__device__ inline int start(int i) { return (blockIdx.x + i * gridDim.x) * ROW; }

// The norm's weights into the second-level cache, while the kernel's predecessor still runs.
__device__ inline void prefetch(const T* weight) {
    for (int i = threadIdx.x; i < ROW; i += THREADS) {
        const Piece* at = (const Piece*)weight + i;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
}

// The block's rows into this rank's slot.
__device__ inline void lay_out(const Call& call, const T* x, int rows) {
    const Piece* from = (const Piece*)x;
    auto place = [](int i) { return start(i / ROW) + i % ROW; };
    pass<4>(threadIdx.x, own_rows(rows) * ROW, THREADS, [&](int i) { return from[place(i)]; },
            [&](int i, const Piece& p) { ((Piece*)call.mine)[place(i)] = p; });
}

// fetch(row, at) loads what the sum of vector `at` of a row needs, sum(that) is this sum. A row is fetched while the one
// before is normed.
template <class F, class S>
__device__ inline void add_norm(T* x, T* residual, const T* weight, int rows, float eps, F fetch, S sum) {
    decltype(fetch(0, 0)) held[PER];
    Piece stream[PER], found[PER];
    auto ask = [&](int row) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (within(i)) {
                int at = threadIdx.x + i * THREADS;
                held[i] = fetch(row, at);
                stream[i] = ((const Piece*)residual)[row * ROW + at];
            }
    };
    ask(blockIdx.x);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (within(i)) {
                // Rounded before it is added, as the two operations one after the other do.
                Piece p = sum(held[i]);
#pragma unroll
                for (int j = 0; j < V; j++) found[i].x[j] = narrow<T>(wide(p.x[j]) + wide(stream[i].x[j]));
                ((Piece*)residual)[row * ROW + threadIdx.x + i * THREADS] = found[i];
            }
        if (row + gridDim.x < rows) ask(row + gridDim.x);
        __syncthreads();
        finish(found, weight, x + row * N, eps);
    }
}

// Every rank reads everything.
extern "C" __global__ void __launch_bounds__(THREADS)
one_shot_add_norm(T* x, T* residual, const T* weight, const Table* table, int rank, int rows, float eps) {
    prefetch(weight);
    Call call = begin(table, rank);
    lay_out(call, x, rows);
    meet(call, 2);
    auto ask = [&](int row, int at) { return parts(call, row * ROW + at); };
    if constexpr (PER * SIZE <= 8)
        add_norm(x, residual, weight, rows, eps, ask, [](const Parts& p) { return total(p); });
    else  // so many do not fit in registers
        add_norm(x, residual, weight, rows, eps, [&](int row, int at) { return total(ask(row, at)); },
                 [](const Piece& p) { return p; });
    end(call);
}

// Each rank adds up one share of each row and leaves the sum in place of its own input, which nobody else reads; then
// all read all shares.
extern "C" __global__ void __launch_bounds__(THREADS)
two_shot_add_norm(T* x, T* residual, const T* weight, const Table* table, int rank, int rows, float eps) {
    prefetch(weight);
    Call call = begin(table, rank);
    lay_out(call, x, rows);
    meet(call, 1);
    int first = rank * SHARE, width = ROW % SIZE ? max(min(SHARE, ROW - first), 0) : SHARE;
    auto place = [&](int i) { return start(i / width) + first + i % width; };
    pass<AHEAD>(threadIdx.x, own_rows(rows) * width, THREADS, [&](int i) { return parts(call, place(i)); },
                [&](int i, const Parts& p) { ((Piece*)call.mine)[place(i)] = total(p); });
    meet(call, 2);
    auto ask = [&](int row, int at) {
        const char* slot = call.slots[0];
#pragma unroll
        for (int r = 1; r < SIZE; r++) {
            const char* other = call.slots[r];
            slot = at / SHARE == r ? other : slot;
        }
        return ((const Piece*)slot)[row * ROW + at];
    };
    add_norm(x, residual, weight, rows, eps, ask, [](const Piece& p) { return p; });
    end(call);
}
