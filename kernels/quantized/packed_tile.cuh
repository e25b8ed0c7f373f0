// Packed tiles of 16 outputs as lanes take them from registers: for each of 32 lanes WORDS words of codes, 16 or at last
// 8 bytes of all lanes at a time; then scales and the like, TABLE_WORDS of a lane, whose places table_at() has.

struct PackedTile {  // a lane's part
    unsigned words[WORDS], tables[TABLE_WORDS];
};

// Bytes at a distance from a packed tile's begin. In memory from where a lane's codes and tables begin, so that addresses
// differ by constants.
struct Memory {
    const unsigned char *words, *tables;
    int lane;

    __device__ uint4 read16(int at) const { return stream16(words + (at - lane * 16)); }
    __device__ uint2 read8(int at) const { return stream8(words + (at - lane * 16)); }
    __device__ unsigned read4(int at) const { return stream4(tables + (at - table_at(0, lane))); }
};
struct Shared {
    unsigned from;

    __device__ uint4 read16(int at) const { return load_shared16(from + at); }
    __device__ uint2 read8(int at) const { return load_shared8(from + at); }
    __device__ unsigned read4(int at) const { return load_shared4(from + at); }
};

// A lane's codes.
template <class Bytes> __device__ inline void read_words(const Bytes& bytes, int lane, unsigned (&words)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
        const uint4 x = bytes.read16(i * 512 + lane * 16);
        words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
    }
    if constexpr (WORDS % 4) {
        const uint2 x = bytes.read8(512 + lane * 8);
        words[4] = x.x, words[5] = x.y;
    }
}

// known: the first of the tables, so many.
template <class Bytes>
__device__ inline PackedTile read_tile(const Bytes& bytes, int lane, const unsigned* known = nullptr, int count = 0) {
    PackedTile y;
    read_words(bytes, lane, y.words);
#pragma unroll
    for (int i = 0; i < TABLE_WORDS; i++) y.tables[i] = i < count ? known[i] : bytes.read4(table_at(i, lane));
    return y;
}

// A lane's parts of packed tiles in memory.
struct PackedTiles {
    const unsigned char *words, *tables;
    int lane;

    PackedTiles() = default;
    __device__ PackedTiles(const unsigned char* from, int lane)
        : words(from + lane * 16), tables(from + table_at(0, lane)), lane(lane) {}
    __device__ PackedTile stream(int tile) const {
        return read_tile(Memory{words + tile * PACKED_BYTES, tables + tile * PACKED_BYTES, lane}, lane);
    }
    __device__ void advance(int tiles) { words += tiles * PACKED_BYTES, tables += tiles * PACKED_BYTES; }
};

// quantized_experts.cu loads an n-tile through registers, a whole packed tile at a time.
constexpr int STREAMED = SPAN;  // inputs
typedef PackedTile Streamed;
struct Stream {
    PackedTiles all;

    Stream() = default;
    __device__ Stream(const unsigned char* from, int lane) : all(from, lane) {}
    __device__ Streamed get(int more) const { return all.stream(more); }
    __device__ void advance(int count) { all.advance(count); }
};

// From shared memory.
__device__ inline PackedTile load_packed_tile(unsigned from, int lane, int = -1) { return read_tile(Shared{from}, lane); }
