// super_blocks: ggml's types with scales of two levels: (code - ZERO) * scale - minimum, where scale and minimum of a
// group of inputs are whole numbers of 8 bits times two f16 factors of a super-block.
//
// A piece is 16 outputs by 64 inputs, as tensor cores take them from registers: for each of 32 lanes 4 * BITS bytes of
// codes, 16 bytes of all lanes at a time; then, for each SUPER inputs, 4 bytes for outputs g and g + 8: the factors of
// their scales; then the same of minima; then, for each GROUP inputs, 4 bytes for outputs g and g + 8: their scales,
// their minima. Codes of 4 bits: lane 4 g + t has in word s the codes of inputs 16 s + 2 t and + 1 of output g in bits 0
// and 16, of output g + 8 in bits 4 and 20, and of inputs 16 s + 2 t + 8 and + 9 of the same outputs in bits 8 and 24,
// and 12 and 28. Codes of 8 bits: in word 2 s + h those of output g + 8 h and of inputs 16 s + 2 t, + 8, + 1 and + 9.
// super_blocks_cuda.py makes pieces.

constexpr int SPAN = 64, SCALED = SPAN, WORDS = BITS;  // inputs of a piece; a lane's words of codes
constexpr int SUPERS = SPAN / SUPER, GROUPS_OF_PIECE = SPAN / GROUP;
constexpr int FACTORS = 128 * WORDS, NUMBERS = FACTORS + 64 * SUPERS, PIECE = NUMBERS + 32 * GROUPS_OF_PIECE;  // bytes

struct Piece {  // a lane's part
    unsigned words[WORDS], of_scales[SUPERS], of_minima[SUPERS], numbers[GROUPS_OF_PIECE];
};

// A piece by what reads 16 bytes, and 4, at a distance from its begin.
template <class Read16, class Read4> __device__ inline Piece read_piece(int lane, Read16 read16, Read4 read4) {
    Piece y;
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
        const uint4 x = read16(i * 512 + lane * 16);
        y.words[4 * i] = x.x, y.words[4 * i + 1] = x.y, y.words[4 * i + 2] = x.z, y.words[4 * i + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < SUPERS; i++) {
        y.of_scales[i] = read4(FACTORS + i * 32 + lane / 4 * 4);
        y.of_minima[i] = read4(FACTORS + (SUPERS + i) * 32 + lane / 4 * 4);
    }
#pragma unroll
    for (int i = 0; i < GROUPS_OF_PIECE; i++) y.numbers[i] = read4(NUMBERS + i * 32 + lane / 4 * 4);
    return y;
}

// A lane's parts of pieces in memory.
struct Pieces {
    const unsigned char* from;
    int lane;

    Pieces() = default;
    __device__ Pieces(const unsigned char* from, int lane) : from(from), lane(lane) {}
    __device__ Piece stream(int piece) const {
        const unsigned char* const at = from + piece * PIECE;
        return read_piece(lane, [&](int i) { return stream16(at + i); }, [&](int i) { return stream4(at + i); });
    }
    __device__ void advance(int pieces) { from += pieces * PIECE; }
};

// From shared memory.
__device__ inline Piece shared_piece(unsigned from, int lane) {
    return read_piece(lane, [&](int i) { return load_shared16(from + i); }, [&](int i) { return load_shared4(from + i); });
}

// A signed byte of a word.
__device__ inline float byte_of(unsigned word, int byte) { return (int)(word << (24 - 8 * byte)) >> 24; }

// The code of input 2 (lane % 4) + 8 (i / 2) + `second` of inputs from 16 step on, of output lane / 4 + 8 (i % 2).
__device__ inline float code(const Piece& piece, int step, int i, int second) {
    const unsigned found = BITS == 4 ? piece.words[step] >> (4 * i + 16 * second) & 15
                                     : piece.words[2 * step + i % 2] >> (8 * (i / 2) + 16 * second) & 255;
    return __uint_as_float(0x4b000000 | found) - (8388608.0f + ZERO);  // 2^23 + code has no more bits than a float
}

// Weights of inputs 16 step to 16 step + 15, rounded once, as the first operand of a matmul.
template <class E> __device__ inline void weights(const Piece& piece, int step, unsigned (&a)[4]) {
    const float2 of_scales = unpack<f16>(piece.of_scales[step * 16 / SUPER]);
    const float2 of_minima = unpack<f16>(piece.of_minima[step * 16 / SUPER]);
    const unsigned numbers = piece.numbers[step * 16 / GROUP];
    const float scales[2] = {of_scales.x * byte_of(numbers, 0), of_scales.y * byte_of(numbers, 1)};
    const float minima[2] = {of_minima.x * byte_of(numbers, 2), of_minima.y * byte_of(numbers, 3)};
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = pack<E>(fmaf(code(piece, step, i, 0), scales[i % 2], -minima[i % 2]),
                       fmaf(code(piece, step, i, 1), scales[i % 2], -minima[i % 2]));
}

// What is multiplied is weights: minima leave no codes that could be scaled afterwards.
template <class E> __device__ inline void codes(const Piece& piece, int step, unsigned (&a)[4]) {
    weights<E>(piece, step, a);
}
__device__ inline float2 scales(const Piece& piece, int step) { return {1, 1}; }
