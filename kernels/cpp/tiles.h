// Tile registers of AMX: up to 16 rows of 64 bytes, and dot products of one's rows with another's columns. Included
// after simd.h. TILES is defined where there are any.
//
// With EMULATED_TILES plain C++ does the same, on processors without AMX: tests compare all that stands around the tiles,
// and it traps where processors do, on tiles whose shapes do not fit.

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define TILES 1
#elif defined(EMULATED_TILES)
#define TILES 1
#endif

#if defined(TILES)
// How many rows and bytes of a row the tiles have: palette 1 of ldtilecfg.
struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int of_rows, int of_bytes) {
        if (of_rows > 16 || of_bytes > 64) __builtin_trap();
        rows[tile] = of_rows, bytes[tile] = of_bytes;
    }
};

#if defined(EMULATED_TILES)
struct EmulatedTiles {
    TileShapes shapes;
    uint8_t data[8][16][64];
};
static thread_local EmulatedTiles emulated;

INLINE void tiles_begin(const TileShapes& shapes) {
    emulated.shapes = shapes;
    memset(emulated.data, 0, sizeof(emulated.data));
}
INLINE void tiles_end() {}
template <int TILE> INLINE void tile_zero() { memset(emulated.data[TILE], 0, sizeof(emulated.data[TILE])); }
template <int TILE> INLINE void tile_load(const void* from, int64_t pitch) {
    for (int i = 0; i < emulated.shapes.rows[TILE]; i++)
        memcpy(emulated.data[TILE][i], (const char*)from + i * pitch, emulated.shapes.bytes[TILE]);
}
template <int TILE> INLINE void tile_store(void* to, int64_t pitch) {
    for (int i = 0; i < emulated.shapes.rows[TILE]; i++)
        memcpy((char*)to + i * pitch, emulated.data[TILE][i], emulated.shapes.bytes[TILE]);
}
// C [m, n] += A [m, k] B [k, n]: rows are counted, and fours of bytes in them.
template <int C, int A, int B> INLINE void tiles_fit() {
    const TileShapes& of = emulated.shapes;
    if (of.rows[A] != of.rows[C] || of.rows[B] * 4 != of.bytes[A] || of.bytes[B] != of.bytes[C]) __builtin_trap();
}
template <int C, int A, int B> INLINE void tile_dot_su() {
    tiles_fit<C, A, B>();
    for (int m = 0; m < emulated.shapes.rows[C]; m++)
        for (int n = 0; n < emulated.shapes.bytes[C] / 4; n++) {
            int32_t& sum = ((int32_t*)emulated.data[C][m])[n];
            for (int k = 0; k < emulated.shapes.bytes[A]; k++)
                sum += (int8_t)emulated.data[A][m][k] * (int32_t)emulated.data[B][k / 4][4 * n + k % 4];
        }
}
template <int C, int A, int B> INLINE void tile_dot_bf16() {
    tiles_fit<C, A, B>();
    for (int m = 0; m < emulated.shapes.rows[C]; m++)
        for (int n = 0; n < emulated.shapes.bytes[C] / 4; n++) {
            float& sum = ((float*)emulated.data[C][m])[n];
            for (int k = 0; k < emulated.shapes.bytes[A] / 2; k++)
                sum += widen(((bf16*)emulated.data[A][m])[k]) * widen(((bf16*)emulated.data[B][k / 2])[2 * n + k % 2]);
        }
}
#else
// In assembly, as compilers' macros take no template's number for a tile, and GCC 12's do not declare that memory is
// read.
INLINE void tiles_begin(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
// Else the kernel would save and restore tiles at every switch of threads.
INLINE void tiles_end() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int TILE> INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int TILE> INLINE void tile_load(const void* from, int64_t pitch) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(pitch), "i"(TILE) : "memory");
}
template <int TILE> INLINE void tile_store(void* to, int64_t pitch) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(pitch), "i"(TILE) : "memory");
}
// C [m, n] += A [m, k] B [k / 4, n, 4]: signed bytes times unsigned ones.
template <int C, int A, int B> INLINE void tile_dot_su() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// C [m, n] += A [m, k] B [k / 2, n, 2] of bf16; sums are f32.
template <int C, int A, int B> INLINE void tile_dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif
#endif
