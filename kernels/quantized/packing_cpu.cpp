// Weights as files hold them, laid out as kernels for CPUs read them: in blocks of 16 outputs (blocks.h). Each layout
// is also what the torch code next to the callers makes, byte for byte.

#include "op.h"
#include "simd.h"
#include "ggml_types.h"

constexpr int BLOCK = 16;  // outputs
constexpr int RUN = 32;    // inputs whose codes lie together
constexpr int GROUPS = 16;  // of a super-block, at most

enum Heads {
    OF_SUPERS,  // 32 f16 factors of a super-block, and bytes of each group (super_blocks_cpu.cpp)
    OF_GROUPS,  // an f16 scale of each 32 inputs (q8_0_cpu.cpp, int4_cpu.cpp)
};

struct Type {
    int super, group;  // inputs
    int bits, zero;    // of a code as it is kept; what all codes have too much
    int bytes;         // of a super-block in files
    Heads heads;
    void (*decode)(const Type& type, const uint8_t* p, Numbers& y);
    bool minima = false;   // whether groups have them
    int above = 0;         // by which scales are stored larger than they are; -1: factors are the scales
    constexpr int groups() const { return super / group; }
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

INLINE void put_half(f16 x, uint8_t* to, int o) { memcpy(to + 2 * o, &x, 2); }

static void put(const Type& type, const Numbers& x, uint8_t* to, int o) {
    const int groups = RUN / type.group;
    if (type.heads == OF_SUPERS) put_half(x.factors[0], to, o), put_half(x.factors[1], to + 2 * BLOCK, o);
    to += type.head();
    for (int r = 0; r < type.super / RUN; r++, to += type.run_bytes()) {
        if (type.heads == OF_GROUPS) put_half(x.factors[0], to, o);
        for (int h = 0; type.heads == OF_SUPERS && h < groups; h++) {
            to[h * 2 * BLOCK + o] = x.numbers[r * groups + h];
            to[(h * 2 + 1) * BLOCK + o] = x.numbers[type.groups() + r * groups + h];
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
    Numbers x, none = {};
    memset(none.codes, type.padding(), sizeof none.codes);
    for (int64_t b = share.first; b < share.last; b++) {
        uint8_t* y = (uint8_t*)a.y + b * a.supers * type.packed();
        for (int64_t s = 0; s < a.supers; s++, y += type.packed()) {
            for (int o = 0; o < BLOCK; o++) {
                const int64_t row = b * BLOCK + o;
                if (row < a.outputs) type.decode(type, (const uint8_t*)a.blocks + (row * a.supers + s) * type.bytes, x);
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
    Numbers x;
    for (int64_t s = share.first; s < share.last; s++) {
        type.decode(type, (const uint8_t*)a.blocks + s * type.bytes, x);
        float* y = (float*)a.y + s * type.super;
        const float factor = widen(x.factors[0]), other = widen(x.factors[1]);
        for (int g = 0; g < type.super / type.group; g++, y += type.group) {
            const bool own = type.heads == OF_SUPERS;
            const int8_t *scales = (const int8_t*)x.numbers, *minima = scales + type.groups();
            const float scale = own ? factor * scales[g] : factor;
            for (int i = 0; i < type.group; i++) y[i] = (float)(x.codes[g * type.group + i] - type.zero) * scale;
            if (own && minima[g]) subtract(y, other * minima[g], type.group);
        }
    }
}

// Numbers of a block as kernels have them: scales and minima are int8.
template <class B> static void decode(const Type& type, const uint8_t* p, Numbers& y) {
    B::read(p, y);
    uint8_t *scales = y.numbers, *minima = scales + type.groups();
    if (type.above < 0) memset(scales, 1, GROUPS);
    if (type.above > 0)
        for (int g = 0; g < GROUPS; g++) scales[g] = (uint8_t)(scales[g] - type.above);
    if (type.above < 0 || !type.minima) memset(minima, type.minima ? -1 : 0, GROUPS);
}

// Codes around 0 as the kernels of Q8_0 have them: more by 128, and of no scale below 0. LESS: what they have too much.
template <class B, int LESS> static void decode_signed(const Type&, const uint8_t* p, Numbers& y) {
    B::read(p, y);
    const bool below = y.factors[0].bits >> 15;
    for (int i = 0; i < RUN; i++) {
        const int code = (int8_t)(y.codes[i] - LESS);
        y.codes[i] = (uint8_t)((below ? -code : code) + 128);
    }
    y.factors[0].bits &= 0x7fff;
}

// The numbers that codes of IQ4 stand for, more by 128, and those of a scale below 0.
alignas(16) static const uint8_t TABLES[2][16] = {
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {255, 232, 211, 193, 177, 163, 150, 138, 127, 115, 103, 90, 75, 59, 39, 15},
};

static void decode_iq4_nl(const Type&, const uint8_t* p, Numbers& y) {
    IQ4_NL::read(p, y);
    const uint8_t* table = TABLES[y.factors[0].bits >> 15];
    look_up(table, y.codes, y.codes), look_up(table, y.codes + 16, y.codes + 16);
    y.factors[0].bits &= 0x7fff;
}

static void decode_iq4_xs(const Type& type, const uint8_t* p, Numbers& y) {
    decode<IQ4_XS>(type, p, y);
    for (int i = 0; i < SUPER; i += 16) look_up(TABLES[0], y.codes + i, y.codes + i);
}

#define TYPE_OPS(name, super, group, bits, zero, B, heads, ...)                                   \
    static const Type name = {super, group, bits, zero, B::BYTES, heads, __VA_ARGS__};            \
    static void pack_of_##name(const Pack& a, int part, int parts) {                              \
        pack(name, a, part, parts);                                                               \
    }                                                                                             \
    static void dequantize_of_##name(const Dequantize& a, int part, int parts) {                  \
        dequantize(name, a, part, parts);                                                         \
    }                                                                                             \
    OP(pack_##name, pack_of_##name, Pack)                                                         \
    OP(dequantize_##name, dequantize_of_##name, Dequantize)
TYPE_OPS(q4_0, 32, 32, 4, 8, Q4_0, OF_GROUPS, decode<Q4_0>, false, -1)
TYPE_OPS(q4_1, 32, 32, 4, 0, Q4_1, OF_SUPERS, decode<Q4_1>, true, -1)
TYPE_OPS(q5_0, 32, 32, 8, 128, Q5_0, OF_GROUPS, (decode_signed<Q5_0, 16>))
TYPE_OPS(q5_1, 32, 32, 6, 0, Q5_1, OF_SUPERS, decode<Q5_1>, true, -1)
TYPE_OPS(q8_0, 32, 32, 8, 128, Q8_0, OF_GROUPS, (decode_signed<Q8_0, 0>))
TYPE_OPS(iq4_nl, 32, 32, 8, 128, IQ4_NL, OF_GROUPS, decode_iq4_nl)
TYPE_OPS(q2_k, 256, 16, 4, 0, Q2_K, OF_SUPERS, decode<Q2_K>, true)
TYPE_OPS(q3_k, 256, 16, 4, 4, Q3_K, OF_SUPERS, decode<Q3_K>, false, 32)
TYPE_OPS(q4_k, 256, 32, 4, 0, Q4_K, OF_SUPERS, decode<Q4_K>, true)
TYPE_OPS(q5_k, 256, 32, 6, 0, Q5_K, OF_SUPERS, decode<Q5_K>, true)
TYPE_OPS(q6_k, 256, 16, 6, 32, Q6_K, OF_SUPERS, decode<Q6_K>)
TYPE_OPS(iq4_xs, 256, 32, 8, 128, IQ4_XS, OF_SUPERS, decode_iq4_xs, false, 32)
TYPE_OPS(tq2_0, 256, 32, 4, 1, TQ2_0, OF_SUPERS, decode<TQ2_0>, false, -1)

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

// Codes of 4 bits in 32-bit words → a byte each, [outputs, inputs].
struct Unpack {
    const void* words;
    void* codes;
    int64_t outputs, inputs;
};

constexpr int TILE = 64;  // outputs and inputs at a time: both sides stay in the cache

// GPTQ: words [inputs / 8, outputs], codes along the inputs, the lowest bits first.
static void unpack_along_inputs(const Unpack& a, int part, int parts) {
    Share share((a.outputs + TILE - 1) / TILE, part, parts);
    for (int64_t t = share.first; t < share.last; t++) {
        const int64_t count = a.outputs - t * TILE < TILE ? a.outputs - t * TILE : TILE;
        for (int64_t n = 0; n < a.inputs; n += TILE) {
            const int64_t rows = ((a.inputs - n < TILE ? a.inputs - n : TILE) + 7) / 8;
            // A copy: lines of the same place in rows that lie a power of two apart drive each other out of the cache.
            uint32_t words[TILE / 8][TILE];
            for (int64_t i = 0; i < rows; i++)
                memcpy(words[i], (const uint32_t*)a.words + (n / 8 + i) * a.outputs + t * TILE, count * 4);
            for (int64_t o = 0; o < count; o++) {
                uint8_t* y = (uint8_t*)a.codes + (t * TILE + o) * a.inputs + n;
                for (int64_t i = 0; i < rows; i++) {
                    uint64_t x = words[i][o];
                    x = (x | x << 16) & 0x0000ffff0000ffff, x = (x | x << 8) & 0x00ff00ff00ff00ff;
                    x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
                    memcpy(y + i * 8, &x, 8);
                }
            }
        }
    }
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
