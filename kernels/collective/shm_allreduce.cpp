// The sum over ranks of a host, over memory that they share (shm_allreduce.py): each lays its part out, counts on,
// waits for the others' counts and adds up in rank order, so that all get the same bits. Two alternating slots: who
// fills one again has met all ranks since they read it. One thread does it all, as there is little of it.

#include "op.h"
#include "simd.h"
#include "wait.h"

struct AllReduce {
    float* x;
    float* slots;     // [2, ranks, most]
    int64_t* counts;  // [ranks, line]
    int64_t* calls;   // this rank's own
    int64_t count, ranks, most, rank, line;
};

static void all_reduce(const AllReduce& a, int part, int) {
    if (part) return;
    int64_t call = ++*a.calls;
    float* parts = a.slots + (call & 1) * a.ranks * a.most;
    memcpy(parts + a.rank * a.most, a.x, a.count * 4);
    __atomic_store_n(a.counts + a.rank * a.line, call, __ATOMIC_RELEASE);
    for (int64_t other = 0; other < a.ranks; other++)
        for (Patience patience; __atomic_load_n(a.counts + other * a.line, __ATOMIC_ACQUIRE) < call;)
            if (patience.over()) nap();
    for (int64_t i = 0; i < a.count; i += LANES) {
        int64_t left = a.count - i;
        Vec total = left < LANES ? load(parts + i, left) : load(parts + i);
        for (int64_t other = 1; other < a.ranks; other++) {
            const float* x = parts + other * a.most + i;
            total += left < LANES ? load(x, left) : load(x);
        }
        left < LANES ? store(a.x + i, total, left) : store(a.x + i, total);
    }
}

struct Copy {
    const float* x;
    float* y;  // [ranks, count]: x in this rank's row, zeros in the others
    int64_t count, rank, ranks;
};

static void copy(const Copy& a, int part, int) {
    if (part) return;
    memset(a.y, 0, a.ranks * a.count * sizeof(float));
    memcpy(a.y + a.rank * a.count, a.x, a.count * sizeof(float));
}

OP(copy_f32, copy, Copy)
OP(all_reduce_f32, all_reduce, AllReduce)
