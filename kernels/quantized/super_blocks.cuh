// super_blocks: ggml's types with scales of two levels: (code - ZERO) * scale - minimum, where scale and minimum of a
// group of inputs are whole numbers of 8 bits times two f16 factors of a super-block. Without MINIMA there are no
// minima.
//
// A packed tile is 16 outputs by 64 inputs, as tensor cores take them from registers: for each of 32 lanes 4 * BITS
// bytes of codes, 16 or at last 8 bytes of all lanes at a time; then, for each SUPER inputs, 4 bytes for outputs g and
// g + 8: the factors of their scales; then the same of minima. Then the numbers, each more by 128, two words of 4 bytes
// for outputs g and g + 8 a pair of GROUPs: with MINIMA a word has a group's scales, then its minima; without, two
// groups' scales. Packed tiles of the same FACTORED inputs have the same factors. cuda_layouts.py describes packed tiles.
//
// Codes of 4 bits: lane 4 g + t has in word s the codes of inputs 16 s + 2 t and + 1 of output g in bits 0 and 16, of
// output g + 8 in bits 4 and 20, and of inputs 16 s + 2 t + 8 and + 9 of the same outputs in bits 8 and 24, and 12 and
// 28. Codes of 6 bits: so the lower 4; the upper 2 of inputs 16 s + 2 t, + 8, + 1 and + 9 of output g + 8 h in a byte
// each of word 4 + s / 2, from its bit s % 2 * 2 + 4 h on. Codes of 8 bits: in word 2 s + h those of output g + 8 h and
// of inputs 16 s + 2 t, + 8, + 1 and + 9.
#include "bytes.cuh"

constexpr int SPAN = 64, SCALED = GROUP, WORDS = BITS, KINDS = 1 + MINIMA;  // WORDS: of a lane's codes
constexpr bool BY_RUNS = false, RAW = ZERO < 128 && (MINIMA || GROUP >= 32);  // RAW: whether raw codes are not as codes
constexpr int TOGETHER = MINIMA && GROUP == 32 && FACTORED == 256 ? 4 : 1;  // packed tiles that multiply_together() takes
static_assert((ZERO == 128) == (BITS == 8));
constexpr int SUPERS = SPAN / SUPER, NUMBERS = SPAN / GROUP * KINDS / 2;    // NUMBERS: words of them
constexpr int FACTORS_AT = 128 * WORDS, NUMBERS_AT = FACTORS_AT + 32 * KINDS * SUPERS;
constexpr int PACKED_BYTES = NUMBERS_AT + 32 * NUMBERS;  // bytes

constexpr int TABLE_WORDS = KINDS * SUPERS + NUMBERS;  // factors, then numbers
__device__ constexpr int table_at(int i, int lane) { return FACTORS_AT + i * 32 + lane / 4 * 4; }
#include "packed_tile.cuh"

// Parts that TOGETHER tiles share, and all of their numbers as first operands of an mma: lane 4 g + t has those of
// groups 2 t and 2 t + 1, of outputs g and g + 8.
struct Super {
    unsigned factors[2], scales[2], minima[2];
};
__device__ inline Super shared_super(const PackedTile&, unsigned from, int lane) {
    const unsigned at = from + lane % 4 * PACKED_BYTES + NUMBERS_AT + lane / 4 * 4;
    const unsigned even = load_shared4(at), odd = load_shared4(at + 32);
    auto pair = [&](int byte) {
        unsigned both, other;
        centred_bytes<T>(__byte_perm(even, odd, 0x4400 + byte * 0x1111), both, other);
        return both;
    };
    const unsigned factors = from + FACTORS_AT + lane / 4 * 4;
    return {{load_shared4(factors), load_shared4(factors + 32)}, {pair(0), pair(1)}, {pair(2), pair(3)}};
}
__device__ inline PackedTile load_packed_tile(unsigned from, int lane, const Super& super) {
    return read_tile(Shared{from}, lane, super.factors, 2);
}

// Scales (KIND 0) or minima (1) of outputs lane / 4 and 8 below, of inputs from 16 step on: exact in f32.
template <int KIND> __device__ inline float2 of_two_levels(const PackedTile& tile, int step) {
    const float2 factors = unpack<f16>(tile.tables[KIND * SUPERS + step * 16 / SUPER]);
    const int number = step * 16 / GROUP * KINDS + KIND;
    const unsigned word = tile.tables[KINDS * SUPERS + number / 2];
    return {byte_times(word, number % 2 * 2, factors.x), byte_times(word, number % 2 * 2 + 1, factors.y)};
}
__device__ inline float2 scales(const PackedTile& tile, int step) { return of_two_levels<0>(tile, step); }
__device__ inline float2 minima(const PackedTile& tile, int step) { return of_two_levels<MINIMA>(tile, step); }

// The surplus of `raised_codes`.
template <class E> constexpr float RAISED = 0;
template <> constexpr float RAISED<bf16> = ZERO == 128 ? 0 : 128 + ZERO;
template <> constexpr float RAISED<f16> = ZERO == 128 ? 0 : 1024 + ZERO;

// Codes that are more by RAISED, exactly, of inputs 16 step to 16 step + 15, as the first operand of an mma: to
// subtract it from sums, by the sum of x, takes less than to subtract it from codes.
template <class E> __device__ inline void raised_codes(const unsigned (&words)[WORDS], int step, unsigned (&a)[4]) {
    if constexpr (BITS == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = and_xor(words[step] >> 4 * i, 0x000f000f, whole2(E()));
    } else if constexpr (BITS == 6) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // An output's codes in bytes, whose upper bits are whatever comes along.
            const int up = 4 - step % 2 * 2 - h * 4;
            const unsigned upper = words[4 + step / 2], in_place = up > 0 ? upper << up : upper >> -up;
            const unsigned bytes = chosen_bits(words[step] >> 4 * h, in_place, 0x0f0f0f0f);
            a[h] = and_xor(bytes, 0x003f003f, whole2(E()));
            a[2 + h] = and_xor(bytes >> 8, 0x003f003f, whole2(E()));
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) centred_bytes<E>(words[2 * step + h], a[h], a[2 + h]);
    }
}

// Codes less ZERO, exactly, of the same.
template <class E> __device__ inline void codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
    constexpr unsigned LESS = ZERO | ZERO << 16;
    raised_codes<E>(tile.words, step, a);
    if constexpr (ZERO != 128) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = add2<E>(a[i], (whole2(E()) | 0x80008000) + LESS);
    }
}

// A lane's part of the tables for two groups.
struct Pair {
    unsigned factors[KINDS * SUPERS], numbers[KINDS];
};

// From shared memory. pair: of the packed tile.
__device__ inline Pair shared_pair(unsigned from, int lane, int pair) {
    Pair y;
#pragma unroll
    for (int i = 0; i < KINDS * SUPERS; i++) y.factors[i] = load_shared4(from + FACTORS_AT + i * 32 + lane / 4 * 4);
#pragma unroll
    for (int i = 0; i < KINDS; i++)
        y.numbers[i] = load_shared4(from + NUMBERS_AT + (pair * KINDS + i) * 32 + lane / 4 * 4);
    return y;
}

// Scales (KIND 0) or minima (1) of outputs lane / 4 and 8 below, of the pair's group.
template <int KIND> __device__ inline float2 of_pair(const Pair& pair, int group) {
    const float2 factors = unpack<f16>(pair.factors[KIND * SUPERS + group % SUPERS]);
    const int number = group * KINDS + KIND;
    const unsigned word = pair.numbers[number / 2];
    return {byte_times(word, number % 2 * 2, factors.x), byte_times(word, number % 2 * 2 + 1, factors.y)};
}

// Codes as they are widened the fastest, and what they have too much. Sums of 16 take off an offset at the cost of more
// than they spare.
template <class E> __device__ inline void raw_codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
    if constexpr (RAW)
        raised_codes<E>(tile.words, step, a);
    else
        codes<E>(tile, step, a);
}
template <class E> __device__ inline float2 offsets(const PackedTile&, int) { return {RAISED<E>, RAISED<E>}; }

#include "packed_weights.cuh"
