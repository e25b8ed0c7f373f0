// Codes of 8 bits that half2.cuh's elements are made of, exactly. A word's bytes 0 and 2 are neighbours for the tensor
// cores, and so are 1 and 3.

// 128 or 1024 twice, whose last bits are whole numbers: below them a code's bits are the code.
__device__ constexpr unsigned whole2(bf16) { return 0x43004300; }
__device__ constexpr unsigned whole2(f16) { return 0x64006400; }

// Bytes less 128: those of bytes 0 and 2, and of 1 and 3.
template <class E> __device__ inline void centred_bytes(unsigned word, unsigned& even, unsigned& odd);
template <> __device__ inline void centred_bytes<f16>(unsigned word, unsigned& even, unsigned& odd) {
    // 0x6400 + byte is 1024 + byte.
    even = add2<f16>(__byte_perm(word, 0x64646464, 0x4240), 0xe480e480);
    odd = add2<f16>(__byte_perm(word, 0x64646464, 0x4341), 0xe480e480);
}
template <> __device__ inline void centred_bytes<bf16>(unsigned word, unsigned& even, unsigned& odd) {
    // A bf16 has room for seven bits of the byte: 0x4300 + those is 128 + them, and 0xc380 less the eighth bit is -256
    // or -128.
    const unsigned above = word >> 8;
    even = add2<bf16>(and_xor(word, 0x007f007f, 0x43004300), and_xor(word, 0x00800080, 0xc380c380));
    odd = add2<bf16>(and_xor(above, 0x007f007f, 0x43004300), and_xor(above, 0x00800080, 0xc380c380));
}

// A byte of the word, less 128, times an f16 factor, exactly: 0x4700 0000 + byte * 256 is 32768 + byte, and
// (32768 + 128) * factor has no more bits than a float.
__device__ inline float byte_times(unsigned word, int byte, float factor) {
    return fmaf(__uint_as_float(__byte_perm(word, 0x47000000, 0x7604 | byte << 4)), factor, -32896.0f * factor);
}
