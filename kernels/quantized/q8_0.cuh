// q8_0 (llama.cpp's GGUF): codes of 8 bits, and one f16 scale for each 32 inputs of an output.
//
// A piece is 16 outputs by 32 inputs, as tensor cores take them from registers: 16 bytes of codes for each of 32 lanes,
// then the scales, those of outputs g and g + 8 side by side. Lane 4 g + t has, in word 2 s + h, the codes of output g
// + 8 h and of inputs 16 s + 2 t, + 8, + 1 and + 9: bytes 0 and 2 are neighbours for the tensor cores, and so are 1 and
// 3. A byte is the code plus 128. q8_0_cuda.py makes pieces.

constexpr int PIECE = 544, SPAN = 32, SCALED = 32;  // bytes of a piece, its inputs, and those that share a scale

struct Piece {  // a lane's part
    unsigned words[4], scales;
};

// A lane's parts of pieces in memory.
struct Pieces {
    const unsigned char *words, *scales;

    Pieces() = default;
    __device__ Pieces(const unsigned char* from, int lane) : words(from + lane * 16), scales(from + 512 + lane / 4 * 4) {}
    __device__ Piece stream(int piece) const {
        Piece y;
        const uint4 x = stream16(words + piece * PIECE);
        y.words[0] = x.x, y.words[1] = x.y, y.words[2] = x.z, y.words[3] = x.w;
        y.scales = stream4(scales + piece * PIECE);
        return y;
    }
    __device__ void advance(int pieces) { words += pieces * PIECE, scales += pieces * PIECE; }
};

// From shared memory.
__device__ inline Piece shared_piece(unsigned from, int lane) {
    Piece y;
    const uint4 words = load_shared16(from + lane * 16);
    y.words[0] = words.x, y.words[1] = words.y, y.words[2] = words.z, y.words[3] = words.w;
    y.scales = load_shared4(from + 512 + lane / 4 * 4);
    return y;
}

// What the codes of outputs lane / 4 and 8 below are multiplied by, of inputs from 16 step on.
__device__ inline float2 scales(const Piece& piece, int step) { return unpack<f16>(piece.scales); }

// A word's codes as 16-bit elements, exactly: those of bytes 0 and 2, and of 1 and 3.
template <class E> __device__ inline void widen(unsigned word, unsigned& even, unsigned& odd);
template <> __device__ inline void widen<f16>(unsigned word, unsigned& even, unsigned& odd) {
    // 0x6400 + byte is 1024 + byte.
    even = add_pairs<f16>(__byte_perm(word, 0x64646464, 0x4240), 0xe480e480);
    odd = add_pairs<f16>(__byte_perm(word, 0x64646464, 0x4341), 0xe480e480);
}
template <> __device__ inline void widen<bf16>(unsigned word, unsigned& even, unsigned& odd) {
    // A bf16 has room for seven bits of the byte: 0x4300 + those is 128 + them, and 0xc380 less the eighth bit is -256
    // or -128.
    const unsigned above = word >> 8;
    even = add_pairs<bf16>(and_xor(word, 0x007f007f, 0x43004300), and_xor(word, 0x00800080, 0xc380c380));
    odd = add_pairs<bf16>(and_xor(above, 0x007f007f, 0x43004300), and_xor(above, 0x00800080, 0xc380c380));
}

// Codes of inputs 16 step to 16 step + 15, as the first operand of a matmul.
template <class E> __device__ inline void codes(const Piece& piece, int step, unsigned (&a)[4]) {
    widen<E>(piece.words[2 * step], a[0], a[2]);
    widen<E>(piece.words[2 * step + 1], a[1], a[3]);
}

// The code in this byte of the word times its scale, rounded to f32 nowhere: 0x4700 0000 + byte * 256 is 32768 + byte,
// and (32768 + 128) * scale has no more bits than a float.
__device__ inline float dequantized(unsigned word, int byte, float scale) {
    const float shifted = __uint_as_float(__byte_perm(word, 0x47000000, 0x7604 | byte << 4));
    return fmaf(shifted, scale, -32896.0f * scale);
}

// Weights of inputs 16 step to 16 step + 15, rounded once, as the first operand of a matmul.
template <class E> __device__ inline void weights(const Piece& piece, int step, unsigned (&a)[4]) {
    const float2 by = scales(piece, step);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned word = piece.words[2 * step + h];
        const float scale = h ? by.y : by.x;
        a[h] = pack<E>(dequantized(word, 0, scale), dequantized(word, 2, scale));
        a[2 + h] = pack<E>(dequantized(word, 1, scale), dequantized(word, 3, scale));
    }
}
