// Weights as files hold them, laid out as kernels for CPUs read them: in blocks of 16 outputs (blocks.h). Each layout
// is also what the torch code next to the callers makes, byte for byte.

#include "op.h"
#include "simd.h"

constexpr int BLOCK = 16;    // outputs
constexpr int RUN = 32;      // inputs whose codes lie together
constexpr int SUPER = 256;   // inputs of the largest super-block

// A super-block of ggml's of one output.
struct Decoded {
    alignas(64) uint8_t codes[SUPER];
    uint16_t factors[2];  // f16, of scales and of minima
    int8_t scales[SUPER / 16], minima[SUPER / 16];
};

enum Heads {
    OF_SUPERS,  // 32 f16 factors of a super-block, and bytes of each group (super_blocks_cpu.cpp)
    OF_GROUPS,  // an f16 scale of each 32 inputs (q8_0_cpu.cpp, int4_cpu.cpp)
};

struct Type {
    int super, group;  // inputs
    int bits, zero;    // of a code as it is kept; what all codes have too much
    int bytes;         // of a super-block in files
    Heads heads;
    void (*decode)(const uint8_t* p, Decoded& y);

    constexpr int head() const { return heads == OF_SUPERS ? 4 * BLOCK : 0; }
    constexpr int run_head() const { return heads == OF_SUPERS ? RUN / group * 2 * BLOCK : 2 * BLOCK; }
    constexpr int run_bytes() const { return run_head() + BLOCK * RUN * bits / 8; }
    constexpr int packed() const { return head() + super / RUN * run_bytes(); }  // bytes of sixteen outputs
    constexpr int padding() const { return heads == OF_GROUPS && bits == 8 ? zero : 0; }  // a code behind the last output
};

// Eight neighbouring codes.
INLINE uint64_t eight(const uint8_t* p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

// The codes of one output's 32 inputs, among those of sixteen, with the bits of `flip` in each eight changed.
template <int BITS> INLINE void put_codes(const uint8_t* codes, uint8_t* to, int o, uint64_t flip = 0) {
    for (int i = 0; i < (BITS == 8 ? 4 : 2); i++) {
        uint64_t x = eight(codes + 8 * i) ^ flip;
        if (BITS < 8) x = (x & 0x0f0f0f0f0f0f0f0f) | ((eight(codes + 16 + 8 * i) ^ flip) & 0x0f0f0f0f0f0f0f0f) << 4;
        const uint32_t first = (uint32_t)x, second = (uint32_t)(x >> 32);
        memcpy(to + (2 * i * BLOCK + o) * 4, &first, 4);
        memcpy(to + ((2 * i + 1) * BLOCK + o) * 4, &second, 4);
    }
    for (int i = 0; BITS == 6 && i < 2; i++) {
        constexpr uint64_t upper = 0x0303030303030303;
        const uint64_t low = (eight(codes + 8 * i) ^ flip) >> 4 & upper;
        const uint64_t x = low | ((eight(codes + 16 + 8 * i) ^ flip) >> 4 & upper) << 2;
        const uint32_t four = (uint32_t)(x | x >> 28);
        memcpy(to + 256 + (i * BLOCK + o) * 4, &four, 4);
    }
}

INLINE void put_run(const uint8_t* codes, uint8_t* to, int o, int bits) {
    if (bits == 4) return put_codes<4>(codes, to, o);
    if (bits == 6) return put_codes<6>(codes, to, o);
    put_codes<8>(codes, to, o);
}

INLINE void put_half(uint16_t x, uint8_t* to, int o) { memcpy(to + 2 * o, &x, 2); }

static void put(const Type& type, const Decoded& x, uint8_t* to, int o) {
    const int groups = RUN / type.group;
    if (type.heads == OF_SUPERS) put_half(x.factors[0], to, o), put_half(x.factors[1], to + 2 * BLOCK, o);
    to += type.head();
    for (int r = 0; r < type.super / RUN; r++, to += type.run_bytes()) {
        if (type.heads == OF_GROUPS) put_half(x.factors[0], to, o);
        for (int h = 0; type.heads == OF_SUPERS && h < groups; h++) {
            to[h * 2 * BLOCK + o] = (uint8_t)x.scales[r * groups + h];
            to[(h * 2 + 1) * BLOCK + o] = (uint8_t)x.minima[r * groups + h];
        }
        put_run(x.codes + r * RUN, to + type.run_head(), o, type.bits);
    }
}

struct Pack {
    const void* blocks;  // as ggml's files hold them
    void* y;
    int64_t outputs, supers;
};

static void pack(const Type& type, const Pack& a, int part, int parts) {
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    Decoded x, none = {};
    memset(none.codes, type.padding(), sizeof none.codes);
    for (int64_t b = share.first; b < share.last; b++) {
        uint8_t* y = (uint8_t*)a.y + b * a.supers * type.packed();
        for (int64_t s = 0; s < a.supers; s++, y += type.packed()) {
            for (int o = 0; o < BLOCK; o++) {
                const int64_t row = b * BLOCK + o;
                if (row < a.outputs) type.decode((const uint8_t*)a.blocks + (row * a.supers + s) * type.bytes, x);
                put(type, row < a.outputs ? x : none, y, o);
            }
        }
    }
}

struct Dequantize {
    const void* blocks;
    void* y;  // f32
    int64_t supers;
};

// Not inlined: products that were contracted with this would be rounded once less than gguf-py's.
static __attribute__((noinline)) void subtract(float* x, float y, int count) {
    for (int i = 0; i < count; i++) x[i] -= y;
}

static void dequantize(const Type& type, const Dequantize& a, int part, int parts) {
    Share share(a.supers, part, parts);
    Decoded x;
    for (int64_t s = share.first; s < share.last; s++) {
        type.decode((const uint8_t*)a.blocks + s * type.bytes, x);
        float* y = (float*)a.y + s * type.super;
        const float factor = widen(f16{x.factors[0]}), other = widen(f16{x.factors[1]});
        for (int g = 0; g < type.super / type.group; g++, y += type.group) {
            const bool own = type.heads == OF_SUPERS;
            const float scale = own ? factor * x.scales[g] : factor;
            for (int i = 0; i < type.group; i++) y[i] = (float)(x.codes[g * type.group + i] - type.zero) * scale;
            if (own && x.minima[g]) subtract(y, other * x.minima[g], type.group);
        }
    }
}

// COUNT bytes → codes of 8 / BITS times as many: the lowest bits of all bytes, then the next (Bits.read of
// ggml_types.py).
template <int COUNT, int BITS> INLINE void fields(const uint8_t* x, uint8_t* y) {
    for (int k = 0; k < 8 / BITS; k++)
        for (int i = 0; i < COUNT; i++) y[k * COUNT + i] = x[i] >> BITS * k & ((1 << BITS) - 1);
}

// Likewise, to be more bits of codes that are there.
template <int COUNT, int BITS, int SHIFT> INLINE void add_fields(const uint8_t* x, uint8_t* y) {
    for (int k = 0; k < 8 / BITS; k++)
        for (int i = 0; i < COUNT; i++) y[k * COUNT + i] |= (x[i] >> BITS * k & ((1 << BITS) - 1)) << SHIFT;
}

INLINE const uint8_t* read_factors(const uint8_t* p, int count, Decoded& y) {
    memcpy(&y.factors[0], p, 2);
    memcpy(&y.factors[1], p + 2 * (count - 1), 2);
    return p + 2 * count;
}

INLINE void no_minima(Decoded& y) { memset(y.minima, 0, sizeof y.minima); }

// Codes around 0 as the kernels of Q8_0 have them: more by 128, and of no scale below 0.
INLINE void with_sign(Decoded& y, const int8_t* codes) {
    const bool below = y.factors[0] >> 15;
    for (int i = 0; i < RUN; i++) y.codes[i] = (uint8_t)((below ? -codes[i] : codes[i]) + 128);
    y.factors[0] &= 0x7fff;
}

static void decode_q4_0(const uint8_t* p, Decoded& y) {
    fields<16, 4>(read_factors(p, 1, y), y.codes);
    y.scales[0] = 1;
    no_minima(y);
}

static void decode_q4_1(const uint8_t* p, Decoded& y) {
    fields<16, 4>(read_factors(p, 2, y), y.codes);
    y.scales[0] = 1, y.minima[0] = -1;
}

INLINE void read_q5(const uint8_t* p, uint8_t* y) {
    fields<16, 4>(p + 4, y);
    for (int j = 0; j < 4; j++) {  // a byte's bits to the fifth of eight codes
        constexpr uint64_t each = 0x0101010101010101;
        uint64_t bits = (p[j] * each & 0x8040201008040201) + 0x7f * each, x;
        memcpy(&x, y + 8 * j, 8);
        x |= (bits >> 7 & each) << 4;
        memcpy(y + 8 * j, &x, 8);
    }
}

static void decode_q5_0(const uint8_t* p, Decoded& y) {
    int8_t codes[RUN];
    read_q5(read_factors(p, 1, y), (uint8_t*)codes);
    for (int i = 0; i < RUN; i++) codes[i] = (int8_t)(codes[i] - 16);
    with_sign(y, codes);
}

static void decode_q5_1(const uint8_t* p, Decoded& y) {
    read_q5(read_factors(p, 2, y), y.codes);
    y.scales[0] = 1, y.minima[0] = -1;
}

static void decode_q8_0(const uint8_t* p, Decoded& y) { with_sign(y, (const int8_t*)read_factors(p, 1, y)); }

// The numbers that codes of IQ4 stand for, more by 128, and those of a scale below 0.
alignas(16) static const uint8_t TABLES[2][16] = {
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {255, 232, 211, 193, 177, 163, 150, 138, 127, 115, 103, 90, 75, 59, 39, 15},
};

static void decode_iq4_nl(const uint8_t* p, Decoded& y) {
    fields<16, 4>(read_factors(p, 1, y), y.codes);
    const uint8_t* table = TABLES[y.factors[0] >> 15];
    look_up(table, y.codes, y.codes), look_up(table, y.codes + 16, y.codes + 16);
    y.factors[0] &= 0x7fff;
}

static void decode_q2_k(const uint8_t* p, Decoded& y) {
    for (int i = 0; i < 16; i++) y.scales[i] = p[i] & 15, y.minima[i] = p[i] >> 4;
    fields<32, 2>(p + 16, y.codes), fields<32, 2>(p + 48, y.codes + 128);
    read_factors(p + 80, 2, y);
}

static void decode_q3_k(const uint8_t* p, Decoded& y) {
    fields<32, 2>(p + 32, y.codes), fields<32, 2>(p + 64, y.codes + 128);
    add_fields<32, 1, 2>(p, y.codes);
    fields<8, 4>(p + 96, (uint8_t*)y.scales);
    add_fields<4, 2, 4>(p + 104, (uint8_t*)y.scales);
    for (int i = 0; i < 16; i++) y.scales[i] -= 32;
    no_minima(y);
    read_factors(p + 108, 1, y);
}

// The 12 bytes of Q4_K and Q5_K (KScales of ggml_types.py).
INLINE const uint8_t* read_k_scales(const uint8_t* p, Decoded& y) {
    for (int i = 0; i < 4; i++) {
        y.scales[i] = p[i] & 63, y.scales[4 + i] = (p[8 + i] & 15) | (p[i] >> 2 & 48);
        y.minima[i] = p[4 + i] & 63, y.minima[4 + i] = (int8_t)(p[8 + i] >> 4 | (p[4 + i] >> 2 & 48));
    }
    return p + 12;
}

static void decode_q4_k(const uint8_t* p, Decoded& y) {
    p = read_k_scales(read_factors(p, 2, y), y);
    for (int i = 0; i < 4; i++) fields<32, 4>(p + 32 * i, y.codes + 64 * i);
}

static void decode_q5_k(const uint8_t* p, Decoded& y) {
    p = read_k_scales(read_factors(p, 2, y), y);
    for (int i = 0; i < 4; i++) fields<32, 4>(p + 32 + 32 * i, y.codes + 64 * i);
    add_fields<32, 1, 4>(p, y.codes);
}

static void decode_q6_k(const uint8_t* p, Decoded& y) {
    for (int h = 0; h < 2; h++) {
        fields<64, 4>(p + 64 * h, y.codes + 128 * h);
        add_fields<32, 2, 4>(p + 128 + 32 * h, y.codes + 128 * h);
    }
    memcpy(y.scales, p + 192, 16);
    no_minima(y);
    read_factors(p + 208, 1, y);
}

static void decode_iq4_xs(const uint8_t* p, Decoded& y) {
    p = read_factors(p, 1, y);
    for (int j = 0; j < 4; j++) fields<1, 4>(p + 2 + j, (uint8_t*)y.scales + 2 * j);
    for (int j = 0; j < 2; j++) add_fields<1, 2, 4>(p + j, (uint8_t*)y.scales + 4 * j);
    for (int g = 0; g < 8; g++) y.scales[g] -= 32, fields<16, 4>(p + 6 + 16 * g, y.codes + 32 * g);
    for (int i = 0; i < SUPER; i += 16) look_up(TABLES[0], y.codes + i, y.codes + i);
    no_minima(y);
}

static void decode_tq2_0(const uint8_t* p, Decoded& y) {
    fields<32, 2>(p, y.codes), fields<32, 2>(p + 32, y.codes + 128);
    memset(y.scales, 1, sizeof y.scales);
    no_minima(y);
    read_factors(p + 64, 1, y);
}

#define TYPE_OPS(name, decode, super, group, bits, zero, bytes, heads)                  \
    static const Type name = {super, group, bits, zero, bytes, heads, decode};          \
    static void pack_of_##name(const Pack& a, int part, int parts) {                    \
        pack(name, a, part, parts);                                                     \
    }                                                                                   \
    static void dequantize_of_##name(const Dequantize& a, int part, int parts) {        \
        dequantize(name, a, part, parts);                                               \
    }                                                                                   \
    OP(pack_##name, pack_of_##name, Pack)                                               \
    OP(dequantize_##name, dequantize_of_##name, Dequantize)
TYPE_OPS(q4_0, decode_q4_0, 32, 32, 4, 8, 18, OF_GROUPS)
TYPE_OPS(q4_0_supers, decode_q4_0, 32, 32, 4, 8, 18, OF_SUPERS)
TYPE_OPS(q4_1, decode_q4_1, 32, 32, 4, 0, 20, OF_SUPERS)
TYPE_OPS(q5_0, decode_q5_0, 32, 32, 8, 128, 22, OF_GROUPS)
TYPE_OPS(q5_1, decode_q5_1, 32, 32, 6, 0, 24, OF_SUPERS)
TYPE_OPS(q8_0, decode_q8_0, 32, 32, 8, 128, 34, OF_GROUPS)
TYPE_OPS(iq4_nl, decode_iq4_nl, 32, 32, 8, 128, 18, OF_GROUPS)
TYPE_OPS(q2_k, decode_q2_k, 256, 16, 4, 0, 84, OF_SUPERS)
TYPE_OPS(q3_k, decode_q3_k, 256, 16, 4, 4, 110, OF_SUPERS)
TYPE_OPS(q4_k, decode_q4_k, 256, 32, 4, 0, 144, OF_SUPERS)
TYPE_OPS(q5_k, decode_q5_k, 256, 32, 6, 0, 176, OF_SUPERS)
TYPE_OPS(q6_k, decode_q6_k, 256, 16, 6, 32, 210, OF_SUPERS)
TYPE_OPS(iq4_xs, decode_iq4_xs, 256, 32, 8, 128, 136, OF_SUPERS)
TYPE_OPS(tq2_0, decode_tq2_0, 256, 32, 4, 1, 66, OF_SUPERS)

// Codes a byte each, [outputs, inputs], of which `bits` are kept.
struct PutCodes {
    const void* codes;
    void* y;  // the first run's; runs of a group and groups of an output block follow each other
    int64_t outputs, inputs, bits;
    int64_t runs, run, group, block;  // runs of a group; bytes from run to run, group to group and block to block
    int64_t flip;                     // bits that are changed
};

template <int BITS> static void put_codes_of(const PutCodes& a, int part, int parts) {
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    const uint64_t flip = 0x0101010101010101 * (uint64_t)a.flip;
    const uint8_t none[RUN] = {};
    for (int64_t b = share.first; b < share.last; b++) {
        for (int64_t r = 0; r < a.inputs / RUN; r++) {
            uint8_t* y = (uint8_t*)a.y + b * a.block + r / a.runs * a.group + r % a.runs * a.run;
            for (int o = 0; o < BLOCK; o++) {
                const int64_t row = b * BLOCK + o;
                const uint8_t* codes = (const uint8_t*)a.codes + row * a.inputs + r * RUN;
                put_codes<BITS>(row < a.outputs ? codes : none, y, o, flip);
            }
        }
    }
}

static void put_all_codes(const PutCodes& a, int part, int parts) {
    if (a.bits == 4) return put_codes_of<4>(a, part, parts);
    if (a.bits == 6) return put_codes_of<6>(a, part, parts);
    put_codes_of<8>(a, part, parts);
}
OP(put_codes, put_all_codes, PutCodes)

// Codes of `bits` in 32-bit words, the lowest first → a byte each, [outputs, inputs].
struct Unpack {
    const void* words;
    void* codes;
    int64_t outputs, inputs, bits;
};

constexpr int TILE = 64;  // outputs and inputs at a time: both sides stay in the cache

// Eight codes of 4 bits → a byte each.
INLINE uint64_t apart(uint64_t x) {
    x = (x | x << 16) & 0x0000ffff0000ffff, x = (x | x << 8) & 0x00ff00ff00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}

template <int BITS> static void unpack_words(const Unpack& a, int part, int parts) {
    constexpr int64_t each = 32 / BITS;
    Share share((a.outputs + TILE - 1) / TILE, part, parts);
    for (int64_t t = share.first; t < share.last; t++) {
        const int64_t count = a.outputs - t * TILE < TILE ? a.outputs - t * TILE : TILE;
        for (int64_t n = 0; n < a.inputs; n += TILE) {
            const int64_t rows = ((a.inputs - n < TILE ? a.inputs - n : TILE) + each - 1) / each;
            // A copy: lines of the same place in rows that lie a power of two apart drive each other out of the cache.
            uint32_t words[TILE / each][TILE];
            for (int64_t i = 0; i < rows; i++)
                memcpy(words[i], (const uint32_t*)a.words + (n / each + i) * a.outputs + t * TILE, count * 4);
            for (int64_t o = 0; o < count; o++) {
                uint8_t* y = (uint8_t*)a.codes + (t * TILE + o) * a.inputs + n;
                for (int64_t i = 0; i < rows; i++) {
                    const uint64_t x = BITS == 4 ? apart(words[i][o]) : words[i][o];
                    memcpy(y + i * each, &x, each);
                }
            }
        }
    }
}

// GPTQ: words [inputs * bits / 32, outputs], codes along the inputs.
static void unpack_along_inputs(const Unpack& a, int part, int parts) {
    if (a.bits == 4) return unpack_words<4>(a, part, parts);
    unpack_words<8>(a, part, parts);
}

// AWQ: words [inputs, outputs / 8], codes of 4 bits along the outputs, in an order of their own.
static void unpack_along_outputs(const Unpack& a, int part, int parts) {
    static const int8_t shift[8] = {0, 16, 4, 20, 8, 24, 12, 28};  // of each of eight outputs
    const int64_t words = a.outputs / 8;
    Share share((a.inputs + TILE - 1) / TILE, part, parts);
    for (int64_t t = share.first; t < share.last; t++) {
        const int64_t last = a.inputs < (t + 1) * TILE ? a.inputs : (t + 1) * TILE;
        for (int64_t w = 0; w < words; w++) {
            uint32_t column[TILE];
            for (int64_t i = t * TILE; i < last; i++) column[i - t * TILE] = ((const uint32_t*)a.words)[i * words + w];
            for (int k = 0; k < 8; k++) {
                uint8_t* y = (uint8_t*)a.codes + (w * 8 + k) * a.inputs + t * TILE;
                for (int64_t i = 0; i < last - t * TILE; i++) y[i] = (uint8_t)(column[i] >> shift[k] & 15);
            }
        }
    }
}
OP(unpack_along_inputs, unpack_along_inputs, Unpack)
OP(unpack_along_outputs, unpack_along_outputs, Unpack)

// e4m3 codes [outputs, inputs] → [blocks, inputs, 16] (e4m3_cpu.cpp).
struct PackE4M3 {
    const void* codes;
    void *y, *nans;  // nans: an int64, to which is added how many codes are no numbers
    int64_t outputs, inputs;
};

static void pack_e4m3(const PackE4M3& a, int part, int parts) {
    Share share((a.outputs + BLOCK - 1) / BLOCK, part, parts);
    int64_t nans = 0;
    for (int64_t b = share.first; b < share.last; b++) {
        for (int64_t n = 0; n < a.inputs; n += TILE) {
            const int64_t count = a.inputs - n < TILE ? a.inputs - n : TILE;
            uint8_t made[TILE][BLOCK] = {};
            for (int o = 0; o < BLOCK && b * BLOCK + o < a.outputs; o++) {
                const uint8_t* x = (const uint8_t*)a.codes + (b * BLOCK + o) * a.inputs + n;
                for (int64_t i = 0; i < count; i++) made[i][o] = x[i], nans += (x[i] & 127) == 127;
            }
            memcpy((uint8_t*)a.y + (b * a.inputs + n) * BLOCK, made, count * BLOCK);
        }
    }
    if (nans) __atomic_fetch_add((int64_t*)a.nans, nans, __ATOMIC_RELAXED);
}
OP(pack_e4m3, pack_e4m3, PackE4M3)
