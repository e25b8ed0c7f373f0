// Pieces that a rank writes into another's memory and that say themselves that they have come, word by word: what lies
// there before is zero, and no word of a piece is sent as zero. So neither side waits for a barrier, nor the writer for
// its writes to end. It takes barrier.cuh's two LL buffers of a region, INBOX + SENT bytes each.
//
// Who has received a piece puts zeros back. An LL buffer is written again in the next but one call: whoever has passed the
// barrier of the call between knows that every other rank has begun that call, so that its call before, the last one to
// look into that LL buffer and to clear it, has ended. That barrier may have begun with the call, as nothing of this call
// is told by it, and it has to end within the call.
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
