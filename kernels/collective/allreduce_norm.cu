// residual += the sum of x over the group; x = norm(residual). Rows of N elements, a block to a row. See barrier.cuh.
#include "barrier.cuh"
#include "row.cuh"

// The LL protocol: a rank writes words into another's memory that show themselves that they have arrived: what lies
// there before is zero, and no word is sent as zero. So neither side waits for a barrier, nor the writer for
// its writes to end. It takes barrier.cuh's two LL buffers of a region, INBOX + SENT bytes each.
//
// The receiver of a word puts zero back. An LL buffer is written again in the next but one call: whoever has passed the
// barrier of the call between knows that every other rank has begun that call, so that its call before, the last one to
// look into that LL buffer and to clear it, has ended. That barrier may have begun with the call, as nothing of this
// call is inferred from it, and it has to end within the call.
//
// An access of several words is that many accesses, of which each may be seen on its own (PTX ISA, Vector Data-types).

template <int BYTES> struct alignas(BYTES) Packet {
    unsigned word[BYTES / 4];
};
template <> struct alignas(2) Packet<2> {
    unsigned short word[1];
};

#define RELAXED "relaxed.sys.global."
__device__ inline void ll_load(Packet<16>& y, const void* at) {
    asm volatile("ld." RELAXED "v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.word[0]), "=r"(y.word[1]), "=r"(y.word[2]), "=r"(y.word[3]) : "l"(at));
}
__device__ inline void ll_load(Packet<8>& y, const void* at) {
    asm volatile("ld." RELAXED "v2.u32 {%0, %1}, [%2];" : "=r"(y.word[0]), "=r"(y.word[1]) : "l"(at));
}
__device__ inline void ll_load(Packet<4>& y, const void* at) {
    asm volatile("ld." RELAXED "u32 %0, [%1];" : "=r"(y.word[0]) : "l"(at));
}
__device__ inline void ll_load(Packet<2>& y, const void* at) {
    asm volatile("ld." RELAXED "u16 %0, [%1];" : "=h"(y.word[0]) : "l"(at));
}
__device__ inline void ll_store_packet(void* at, const Packet<16>& y) {
    asm volatile("st." RELAXED "v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "r"(y.word[0]), "r"(y.word[1]), "r"(y.word[2]), "r"(y.word[3]));
}
__device__ inline void ll_store_packet(void* at, const Packet<8>& y) {
    asm volatile("st." RELAXED "v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(y.word[0]), "r"(y.word[1]));
}
__device__ inline void ll_store_packet(void* at, const Packet<4>& y) {
    asm volatile("st." RELAXED "u32 [%0], %1;" ::"l"(at), "r"(y.word[0]));
}
__device__ inline void ll_store_packet(void* at, const Packet<2>& y) {
    asm volatile("st." RELAXED "u16 [%0], %1;" ::"l"(at), "h"(y.word[0]));
}
#undef RELAXED

typedef Packet<sizeof(Vector)> LLVector;

constexpr int RESULTS = INBOX / sizeof(Vector);  // of an LL buffer: from this vector on

// Inverted, a word is zero where all its bits are set: one NaN, or two. It is sent as another of them.
__device__ inline void ll_store(Vector* at, const Vector& p) {
    LLVector y = (const LLVector&)p;
#pragma unroll
    for (auto& word : y.word) {
        word = ~word;
        if (!word) word = 1u << (8 * sizeof(word) - 1);
    }
    ll_store_packet(at, y);
}

__device__ inline bool ll_complete(const LLVector& y) {
    bool all = true;
#pragma unroll
    for (auto word : y.word) all &= word != 0;
    return all;
}

__device__ inline Vector ll_value(LLVector y) {
#pragma unroll
    for (auto& word : y.word) word = ~word;
    return (const Vector&)y;
}

__device__ inline void ll_clear(Vector* at) { ll_store_packet(at, LLVector{}); }

constexpr int ROW = N / V;
constexpr int SHARE = (ROW + SIZE - 1) / SIZE;  // vectors of a row that a rank adds up; the last ranks may have fewer

__device__ inline int own_rows(int rows) { return (rows - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x; }

// The first vector of the block's row number i.
__device__ inline int start(int i) { return (blockIdx.x + i * gridDim.x) * ROW; }

// The norm's weights into the second-level cache, while the kernel's predecessor still runs.
__device__ inline void prefetch(const T* weight) {
    for (int i = threadIdx.x; i < ROW; i += THREADS) {
        const Vector* at = (const Vector*)weight + i;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
}

// The block's rows into this rank's slot.
__device__ inline void store_input(const Call& call, const T* x, int rows) {
    const Vector* from = (const Vector*)x;
    auto place = [](int i) { return start(i / ROW) + i % ROW; };
    strided<4>(threadIdx.x, own_rows(rows) * ROW, THREADS, [&](int i) { return from[place(i)]; },
            [&](int i, const Vector& p) { ((Vector*)call.mine)[place(i)] = p; });
}

// fetch(row, at) loads what the sum of vector `at` of a row needs, sum(that, row, at) is this sum. A row is fetched
// while the one before is normed.
template <class F, class S>
__device__ inline void reduce_add_norm(T* x, T* residual, const T* weight, int rows, float eps, F fetch, S sum) {
    decltype(fetch(0, 0)) held[PER];
    Vector stream[PER], found[PER];
    auto ask = [&](int row) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (in_row(i)) {
                int at = threadIdx.x + i * THREADS;
                held[i] = fetch(row, at);
                stream[i] = ((const Vector*)residual)[row * ROW + at];
            }
    };
    ask(blockIdx.x);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (in_row(i)) {
                // Rounded before it is added, as the two operations one after the other do.
                Vector p = sum(held[i], row, threadIdx.x + i * THREADS);
                found[i] = add(p, stream[i]);
                ((Vector*)residual)[row * ROW + threadIdx.x + i * THREADS] = found[i];
            }
        if (row + gridDim.x < rows) ask(row + gridDim.x);
        __syncthreads();
        write_norm(found, Weights(weight), x + row * N, eps);
    }
}

// Each rank has left the sums of its share in its slot: all read all shares.
__device__ inline void collect(const Call& call, T* x, T* residual, const T* weight, int rows, float eps) {
    barrier(call, 2);
    auto ask = [&](int row, int at) {
        const char* slot = call.slots[0];
#pragma unroll
        for (int r = 1; r < SIZE; r++) {
            const char* other = call.slots[r];
            slot = at / SHARE == r ? other : slot;
        }
        return ((const Vector*)slot)[row * ROW + at];
    };
    reduce_add_norm(x, residual, weight, rows, eps, ask, [](const Vector& p, int, int) { return p; });
}

// All ranks' words of one vector of this rank's share, when they have come.
__device__ inline Parts receive(const Vector* inbox) {
    LLVector got[SIZE];
    bool all;
    do {
        all = true;
#pragma unroll
        for (int r = 0; r < SIZE; r++) ll_load(got[r], inbox + r * SHARE);
#pragma unroll
        for (int r = 0; r < SIZE; r++) all &= ll_complete(got[r]);
    } while (!all);
    Parts p;
#pragma unroll
    for (int r = 0; r < SIZE; r++) p.of[r] = ll_value(got[r]);
    return p;
}

// Each rank adds up one share of each row and leaves the sum in place of its own input, which no other rank reads.
extern "C" __global__ void __launch_bounds__(THREADS)
two_shot_add_norm(T* x, T* residual, const T* weight, const Table* table, int rank, int rows, float eps) {
    prefetch(weight);
    Call call = begin_call(table, rank);
    store_input(call, x, rows);
    barrier(call, 1);
    int first = rank * SHARE, width = ROW % SIZE ? max(min(SHARE, ROW - first), 0) : SHARE;
    auto place = [&](int i) { return start(i / width) + first + i % width; };
    strided<AHEAD>(threadIdx.x, own_rows(rows) * width, THREADS, [&](int i) { return parts(call, place(i)); },
                [&](int i, const Parts& p) { ((Vector*)call.mine)[place(i)] = total(p); });
    collect(call, x, residual, weight, rows, eps);
    end_call(call);
}

// Adds up what others' GEMMs have sent of this rank's share, received [SIZE, rows, SHARE]: added up as above.
extern "C" __global__ void __launch_bounds__(THREADS)
received_add_norm(const T* received, T* x, T* residual, const T* weight, const Table* table, int rank, int rows, float eps) {
    prefetch(weight);
    Call call = begin_call(table, rank);
    barrier(call, 1);  // all have multiplied
    auto parts_of = [&](int i) {
        const Vector* from = (const Vector*)received + (blockIdx.x + i / SHARE * gridDim.x) * SHARE + i % SHARE;
        Parts p;
#pragma unroll
        for (int r = 0; r < SIZE; r++) p.of[r] = from[r * rows * SHARE];
        return p;
    };
    auto place = [&](int i) { return start(i / SHARE) + rank * SHARE + i % SHARE; };
    strided<AHEAD>(threadIdx.x, own_rows(rows) * SHARE, THREADS, parts_of,
                [&](int i, const Parts& p) { ((Vector*)call.mine)[place(i)] = total(p); });
    collect(call, x, residual, weight, rows, eps);
    end_call(call);
}

// Adds up the shares that have come to LL buffer `mine`, and stores the sums in all buffers `to`.
__device__ __forceinline__ void send_sums(Vector* const (&to)[SIZE], Vector* mine, int rank, int rows) {
    const int first = rank * SHARE, width = ROW % SIZE ? max(min(SHARE, ROW - first), 0) : SHARE;
    for (int i = threadIdx.x; i < own_rows(rows) * width; i += THREADS) {
        const int row = blockIdx.x + i / width * gridDim.x, column = i % width;
        Vector* inbox = mine + row * SIZE * SHARE + column;
        const Vector sum = total(receive(inbox));
#pragma unroll
        for (int j = 0; j < SIZE; j++) ll_store(to[j] + RESULTS + row * ROW + first + column, sum);
#pragma unroll
        for (int r = 0; r < SIZE; r++) ll_clear(inbox + r * SHARE);
    }
}

// Each rank sends every rank its share of each row, adds up the shares that it gets, and sends the sum to all. There is
// no barrier between these: a thread waits for single vectors, so that sums travel while later shares still arrive.
extern "C" __global__ void __launch_bounds__(THREADS)
push_add_norm(T* x, T* residual, const T* weight, const Table* table, int rank, int rows, float eps) {
    prefetch(weight);
    // From the next rank on, this one last: no two ranks begin with the same.
    auto whose = [&](int j) { return (rank + 1 + j) % SIZE; };
    Table regions[SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; j++) regions[j] = table[whose(j)];
    Call call = begin_call(table, rank);

    // A LL buffer has the shares that it gets in rows of SIZE times SHARE vectors, and then all rows' sums.
    auto row_of = [&](int i) { return (int)(blockIdx.x + i * gridDim.x); };
    auto exists = [&](int j, int column) { return ROW % SIZE == 0 || whose(j) * SHARE + column < ROW; };
    auto shares = [&](int i) {
        Parts p;
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            if (exists(j, i % SHARE))
                p.of[j] = ((const Vector*)x)[start(i / SHARE) + whose(j) * SHARE + i % SHARE];
        return p;
    };
    const int count = own_rows(rows) * SHARE;
    Parts held;  // on their way while the count of barriers, which the LL buffers depend on, is
    if (threadIdx.x < count) held = shares(threadIdx.x);
    signal(call, 2);
    Vector* to[SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; j++) to[j] = (Vector*)ll_buffer(regions[j], call.before);
    auto deliver = [&](int i, const Parts& p) {
        const int at = (row_of(i / SHARE) * SIZE + rank) * SHARE + i % SHARE;
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            if (exists(j, i % SHARE)) ll_store(to[j] + at, p.of[j]);
    };
    if (threadIdx.x < count) deliver(threadIdx.x, held);
    strided<AHEAD>(threadIdx.x + THREADS, count, THREADS, shares, deliver);

    Vector* mine = to[SIZE - 1];
    send_sums(to, mine, rank, rows);
    wait_for_signal(call, 2);

    Vector* sums = mine + RESULTS;
    auto ask = [&](int row, int at) {
        LLVector y;
        ll_load(y, sums + row * ROW + at);
        return y;
    };
    reduce_add_norm(x, residual, weight, rows, eps, ask, [&](LLVector y, int row, int at) {
        while (!ll_complete(y)) ll_load(y, sums + row * ROW + at);
        ll_clear(sums + row * ROW + at);
        return ll_value(y);
    });
    end_call(call);
}

struct Gathered {  // of one vector
    Vector own;
    LLVector of[SIZE];  // of the others
};

// Each rank sends every other one all of its rows and adds up for itself: nothing is sent twice, one after the other.
extern "C" __global__ void __launch_bounds__(THREADS)
one_way_push_add_norm(T* x, T* residual, const T* weight, const Table* table, int rank, int rows, float eps) {
    prefetch(weight);
    Table regions[SIZE], own = table[rank];
#pragma unroll
    for (int r = 0; r < SIZE; r++) regions[r] = table[r];
    Call call = begin_call(table, rank);
    auto load = [&](int i) { return ((const Vector*)x)[start(i / ROW) + i % ROW]; };
    const int count = own_rows(rows) * ROW;
    Vector first;  // on its way while the count of barriers, which the LL buffers depend on, is
    if (threadIdx.x < count) first = load(threadIdx.x);
    signal(call, 2);
    auto deliver = [&](int i, const Vector& p) {
        const int at = rank * rows * ROW + start(i / ROW) + i % ROW;
#pragma unroll
        for (int r = 0; r < SIZE; r++)
            if (r != rank) ll_store((Vector*)ll_buffer(regions[r], call.before) + at, p);
    };
    if (threadIdx.x < count) deliver(threadIdx.x, first);
    strided<AHEAD>(threadIdx.x + THREADS, count, THREADS, load, deliver);

    Vector* mine = (Vector*)ll_buffer(own, call.before);
    auto from = [&](int r, int row, int at) { return mine + (r * rows + row) * ROW + at; };
    auto ask = [&](int row, int at) {
        Gathered p;
        p.own = ((const Vector*)x)[row * ROW + at];
#pragma unroll
        for (int r = 0; r < SIZE; r++)
            if (r != rank) ll_load(p.of[r], from(r, row, at));
        return p;
    };
    reduce_add_norm(x, residual, weight, rows, eps, ask, [&](Gathered p, int row, int at) {
        Parts all;
#pragma unroll
        for (int r = 0; r < SIZE; r++) {
            all.of[r] = p.own;
            if (r == rank) continue;
            while (!ll_complete(p.of[r])) ll_load(p.of[r], from(r, row, at));
            all.of[r] = ll_value(p.of[r]);
            ll_clear(from(r, row, at));
        }
        return total(all);
    });
    wait_for_signal(call, 2);
    end_call(call);
}
