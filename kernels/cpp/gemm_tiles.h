// GEMMs of bf16 by the tiles of AMX. Included after gemm_rows.h, whose Linear it takes.
//
// A tile of the weight is 16 outputs by 32 inputs as they lie; one of x has 16 rows, with pairs of inputs side by side:
// `pair_rows` brings x into that order once for all outputs. So sums have outputs by rows, and are transposed at the end.

#include "tiles.h"

#if defined(TILES)
constexpr int TILE = 16;       // rows of x, and outputs
constexpr int TILE_INPUTS = 32;
constexpr int64_t PAIRED = TILE * TILE_INPUTS;  // elements of a tile of x
// From how many rows on. On a Xeon with AMX, 16 threads (2026-11-25), tiles took 1.7 times as long as without for an
// expert's 4 rows, and 16 rows 1.5 times as long without.
constexpr int64_t PAIRED_ROWS = 8;

INLINE bool tiles_take(int64_t rows, int64_t inputs) { return rows >= PAIRED_ROWS && inputs % TILE_INPUTS == 0; }

// Inputs g * 32.. of `count` rows of x, sixteen at most, with zeros for the others.
INLINE void pair_tile(const bf16* x, int64_t pitch, int64_t g, int count, bf16* y) {
    Vec rows[TILE] = {};
    for (int r = 0; r < count; r++) memcpy(&rows[r], x + r * pitch + g * TILE_INPUTS, sizeof(Vec));
    transpose(rows);
    memcpy(y, rows, sizeof(rows));
}

// Outputs o.. of a column of C tiles.
template <typename Out> INLINE void store_tile(const Linear& a, const float (&made)[TILE][TILE], int64_t m, int count, int64_t o) {
    Vec rows[TILE];
    memcpy(rows, made, sizeof(rows));
    transpose(rows);
    const int64_t outs = a.outputs - o < TILE ? a.outputs - o : TILE;
    for (int r = 0; r < count; r++) {
        Out* y = (Out*)a.y + (m + r) * a.outputs + o;
        const bf16* bias = (const bf16*)a.bias + o;
        if (outs == TILE)
            store(y, a.bias ? rows[r] + load(bias) : rows[r]);
        else
            store(y, a.bias ? rows[r] + load(bias, outs) : rows[r], outs);
    }
}

// Outputs o.. of rows m.., up to 32 by 16 COLUMNS. x: in pairs, `pitch` elements from one sixteen of rows to the next.
template <int COLUMNS, typename Out>
void tile_of_outputs(const Linear& a, const bf16* x, int64_t pitch, int64_t m, int count, int64_t o) {
    constexpr int WEIGHT = 4, PAIRS = 6;  // tiles; sums of column c: 2 c and 2 c + 1
    const int64_t left = a.outputs - o;
    const bool second = left > TILE;
    const int outs[2] = {left < TILE ? (int)left : TILE, left < 2 * TILE ? (int)(left - TILE) : TILE};
    TileShapes shapes;
    for (int i = 0; i < 1 + second; i++) {
        shapes.set(WEIGHT + i, outs[i], 64);
        for (int c = 0; c < COLUMNS; c++) shapes.set(2 * c + i, outs[i], 64);
    }
    for (int c = 0; c < COLUMNS; c++) shapes.set(PAIRS + c, TILE, 64);
    tiles_begin(shapes);  // sums are zeros then
    const bf16* w = (const bf16*)a.weight + o * a.inputs;
    for (int64_t i = 0; i < a.inputs; i += TILE_INPUTS, w += TILE_INPUTS, x += PAIRED) {
        for (int64_t r = 2 * TILE; r < 4 * TILE && r < left; r++) __builtin_prefetch(w + r * a.inputs, 0, 2);
        tile_load<PAIRS>(x, 64);
        if constexpr (COLUMNS == 2) tile_load<PAIRS + 1>(x + pitch, 64);
        tile_load<WEIGHT>(w, 2 * a.inputs);
        tile_dot_bf16<0, WEIGHT, PAIRS>();
        if constexpr (COLUMNS == 2) tile_dot_bf16<2, WEIGHT, PAIRS + 1>();
        if (second) {
            tile_load<WEIGHT + 1>(w + TILE * a.inputs, 2 * a.inputs);
            tile_dot_bf16<1, WEIGHT + 1, PAIRS>();
            if constexpr (COLUMNS == 2) tile_dot_bf16<3, WEIGHT + 1, PAIRS + 1>();
        }
    }
    alignas(64) float made[4][TILE][TILE] = {};
    tile_store<0>(made[0], 64);
    if (second) tile_store<1>(made[1], 64);
    if constexpr (COLUMNS == 2) tile_store<2>(made[2], 64);
    if constexpr (COLUMNS == 2)
        if (second) tile_store<3>(made[3], 64);
    for (int c = 0; c < COLUMNS; c++)
        for (int i = 0; i < 1 + second; i++) {
            const int rows = count - c * TILE < TILE ? count - c * TILE : TILE;
            store_tile<Out>(a, made[2 * c + i], m + c * TILE, rows, o + i * TILE);
        }
}

// A thread's share of the outputs. paired: x as pair_rows has made it.
template <typename Out> void tiled(const Linear& a, const bf16* paired, int part, int parts) {
    const int64_t pitch = TILE * a.inputs;
    Share share((a.outputs + 2 * TILE - 1) / (2 * TILE), part, parts);
    for (int64_t i = share.first; i < share.last; i++)
        for (int64_t m = 0; m < a.rows; m += 2 * TILE) {
            const int count = a.rows - m < 2 * TILE ? (int)(a.rows - m) : 2 * TILE;
            const bf16* x = paired + m / TILE * pitch;
            if (count > TILE)
                tile_of_outputs<2, Out>(a, x, pitch, m, count, i * 2 * TILE);
            else
                tile_of_outputs<1, Out>(a, x, pitch, m, count, i * 2 * TILE);
        }
}
#endif
