// How blocks of ggml's types hold numbers, as TYPES of kernels/quantized/ggml_types.py has it. simd.h comes before.

constexpr int SUPER = 256;  // inputs of the largest super-block

// The contents of a block.
struct Numbers {
    alignas(64) uint8_t codes[SUPER];
    uint8_t numbers[32];  // the scales of all groups, then their minima
    f16 factors[2];       // of scales, and of minima where there are two
};

// BYTES of a block that hold BITS of each number, from SHIFT on: of each SPAN bytes the lowest bits of all, then the
// next.
template <int BYTES_, int BITS, int SPAN, int SHIFT> struct Bits {
    static constexpr int BYTES = BYTES_, EACH = 8 / BITS, MASK = (1 << BITS) - 1;

    static INLINE void read(const uint8_t* x, uint8_t* y) {
        for (int s = 0; s < BYTES; s += SPAN, x += SPAN, y += SPAN * EACH) {
            if (BITS * SPAN == 1) {  // a byte's bits to eight codes
                constexpr uint64_t each = 0x0101010101010101;
                const uint64_t bits = ((*x * each & 0x8040201008040201) + 0x7f * each) >> 7 & each;
                uint64_t eight;
                memcpy(&eight, y, 8);
                eight |= bits << SHIFT;
                memcpy(y, &eight, 8);
                continue;
            }
            for (int k = 0; k < EACH; k++)
                for (int i = 0; i < SPAN; i++) {
                    const uint8_t bits = (uint8_t)((x[i] >> BITS * k & MASK) << SHIFT);
                    y[k * SPAN + i] = SHIFT ? y[k * SPAN + i] | bits : bits;
                }
        }
    }
    static INLINE void write(const uint8_t* x, uint8_t* y) {
        for (int s = 0; s < BYTES; s += SPAN, y += SPAN, x += SPAN * EACH)
            for (int i = 0; i < SPAN; i++) {
                int made = 0;
                for (int k = 0; k < EACH; k++) made |= (x[k * SPAN + i] >> SHIFT & MASK) << BITS * k;
                y[i] = (uint8_t)made;
            }
    }
};

template <int BYTES, int BITS, int SPAN, int SHIFT = 0> struct Codes : Bits<BYTES, BITS, SPAN, SHIFT> {
    static constexpr bool MORE = SHIFT > 0;  // whether these are bits of numbers that have been read

    static INLINE void read(const uint8_t* x, Numbers& y) { Bits<BYTES, BITS, SPAN, SHIFT>::read(x, y.codes); }
    static INLINE void write(const Numbers& x, uint8_t* y) { Bits<BYTES, BITS, SPAN, SHIFT>::write(x.codes, y); }
};

template <int BYTES, int BITS, int SPAN, int SHIFT = 0> struct Scales : Bits<BYTES, BITS, SPAN, SHIFT> {
    static constexpr bool MORE = SHIFT > 0;

    static INLINE void read(const uint8_t* x, Numbers& y) { Bits<BYTES, BITS, SPAN, SHIFT>::read(x, y.numbers); }
    static INLINE void write(const Numbers& x, uint8_t* y) { Bits<BYTES, BITS, SPAN, SHIFT>::write(x.numbers, y); }
};

template <int COUNT> struct Factors {
    static constexpr int BYTES = 2 * COUNT;
    static constexpr bool MORE = false;

    static INLINE void read(const uint8_t* x, Numbers& y) {
        memcpy(y.factors, x, BYTES);
        if (COUNT == 1) y.factors[1] = y.factors[0];
    }
    static INLINE void write(const Numbers& x, uint8_t* y) { memcpy(y, x.factors, BYTES); }
};

struct KScales {
    static constexpr int BYTES = 12;
    static constexpr bool MORE = false;

    static INLINE void read(const uint8_t* x, Numbers& to) {
        uint8_t *scales = to.numbers, *minima = scales + 8;
        for (int i = 0; i < 4; i++) {
            scales[i] = x[i] & 63, scales[4 + i] = (x[8 + i] & 15) | (x[i] >> 2 & 48);
            minima[i] = x[4 + i] & 63, minima[4 + i] = (uint8_t)(x[8 + i] >> 4 | (x[4 + i] >> 2 & 48));
        }
    }
    static INLINE void write(const Numbers& from, uint8_t* y) {
        const uint8_t *scales = from.numbers, *minima = scales + 8;
        for (int i = 0; i < 4; i++) {
            y[i] = scales[i] | (scales[i + 4] & 48) << 2;
            y[i + 4] = minima[i] | (minima[i + 4] & 48) << 2;
            y[i + 8] = (scales[i + 4] & 15) | (minima[i + 4] & 15) << 4;
        }
    }
};

// A block: its parts, one behind the other.
template <class... PARTS> struct Block {
    static constexpr int BYTES = (PARTS::BYTES + ...);

    static INLINE void read(const uint8_t* x, Numbers& y) {
        const uint8_t* at = x;
        ((PARTS::MORE ? void() : PARTS::read(at, y), at += PARTS::BYTES), ...);
        at = x;
        ((PARTS::MORE ? PARTS::read(at, y) : void(), at += PARTS::BYTES), ...);
    }
    static INLINE void write(const Numbers& x, uint8_t* y) { ((PARTS::write(x, y), y += PARTS::BYTES), ...); }
};

typedef Codes<4, 1, 1, 4> Fifths;  // the fifth bits of 32 codes
typedef Codes<16, 4, 16> Fours;    // the lower bits of 32 codes
typedef Block<Factors<1>, Fours> Q4_0;
typedef Block<Factors<2>, Fours> Q4_1;
typedef Block<Factors<1>, Fifths, Fours> Q5_0;
typedef Block<Factors<2>, Fifths, Fours> Q5_1;
typedef Block<Factors<1>, Codes<32, 8, 32>> Q8_0;
typedef Q4_0 IQ4_NL;
typedef Block<Scales<16, 4, 16>, Codes<64, 2, 32>, Factors<2>> Q2_K;
typedef Block<Codes<32, 1, 32, 2>, Codes<64, 2, 32>, Scales<8, 4, 8>, Scales<4, 2, 4, 4>, Factors<1>> Q3_K;
typedef Block<Factors<2>, KScales, Codes<128, 4, 32>> Q4_K;
typedef Block<Factors<2>, KScales, Codes<32, 1, 32, 4>, Codes<128, 4, 32>> Q5_K;
typedef Block<Codes<128, 4, 64>, Codes<64, 2, 32, 4>, Scales<16, 8, 16>, Factors<1>> Q6_K;
typedef Block<Factors<1>, Scales<2, 2, 1, 4>, Scales<4, 4, 1>, Codes<128, 4, 16>> IQ4_XS;
typedef Block<Codes<64, 2, 32>, Factors<1>> TQ2_0;
