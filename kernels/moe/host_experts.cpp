// Experts computed one by one, wherever the weights of each lie: `at` decides which of a stack's
// weights is each expert's. A routed token is a token and one of its k experts; routed token p is of token p / k.
// Routed tokens get places in the order of their experts, so that each expert's rows stand side by side. Several rounds
// may position routed tokens, of other stacks; what all of them have made is added up at the end, in the order of a
// token's experts.

#include <math.h>

#include "op.h"
#include "simd.h"
#include "gemm_rows.h"
#include "gemm_tiles.h"

// Which experts the step's tokens have chosen, and how those that are not resident are served: all by the CPU (mode 1),
// all copied (mode 2), or those with the most tokens copied while the CPU computes the others (mode 0), as many as make
// the longer of the two as short as can be. Scores of the chosen grow, and all decay. Where `adopts`, copied experts
// become resident whose scores are far above the lowest one; the first such one is copied in any case. Way 3: all by
// the CPU, and this one is copied as well.
constexpr int TIMED = 4;                           // an expert's rows that are timed, as in host_choice.py
constexpr double TIMED_ROWS[TIMED] = {1, 4, 16, 64};

struct Choose {
    const int32_t* ids;  // [routed]
    int64_t* slot_of;  // [experts]; -1: not resident
    double* scores;  // [experts]
    int64_t* expert_in;  // [slots]; one whose expert is not resident is not to be used
    int64_t* counts;  // [experts + fixed] routed tokens of each
    int64_t* cpu;  // [experts] its number where the CPU computes it; else -1
    int64_t* copied;  // [experts], of which the first ones are copied
    int64_t* adopted;  // [experts] the slots of those; -1: none
    int64_t* found;  // how many are resident, computed by the CPU, and copied; routed tokens of those of the CPU; how many are adopted
    const double* lag;  // seconds that copies take besides, however many they are
    int64_t routed, experts, slots, first, mode, limit, adopts;  // first: the router's number of expert 0; limit: copies of modes 0 and 3
    int64_t fixed;  // experts that are on the device alone; the router has them just before expert 0, `counts` last
    double cpu_seconds[TIMED], copy, cpu_overlapped, copy_overlapped, decay;  // as in host_choice.py
    double noise, least;  // as in residents.py
};

// The CPU's seconds for an expert of so many rows: in between what was timed, and beyond the last in proportion.
double seconds_of(const double* timed, double rows) {
    int i = 0;
    while (i < TIMED - 1 && rows > TIMED_ROWS[i + 1]) i++;
    if (i == TIMED - 1) return timed[i] * (rows / TIMED_ROWS[i]);
    return timed[i] + (timed[i + 1] - timed[i]) * ((rows - TIMED_ROWS[i]) / (TIMED_ROWS[i + 1] - TIMED_ROWS[i]));
}

// The seconds of CPU and copies that begin together, alone `cpu` and `copies` seconds: next to each other they are
// slower, and who is left has all of the memory.
double both(const Choose& a, double cpu, double copies) {
    const double slow_cpu = cpu * a.cpu_overlapped, slow_copies = copies * a.copy_overlapped;
    return slow_cpu < slow_copies ? slow_cpu + (slow_copies - slow_cpu) / a.copy_overlapped
                                  : slow_copies + (slow_cpu - slow_copies) / a.cpu_overlapped;
}

// The slot whose expert has the lowest score, of those that no token has chosen, if it is far below that of expert e;
// else -1.
int64_t slot_for(const Choose& a, int64_t e) {
    int64_t lowest = -1;
    for (int64_t s = 0; s < a.slots; s++) {
        const int64_t other = a.expert_in[s];
        if (a.slot_of[other] != s || a.counts[other]) continue;
        if (lowest < 0 || a.scores[other] < a.scores[a.expert_in[lowest]]) lowest = s;
    }
    if (lowest < 0) return -1;
    const double mine = a.scores[e], other = a.scores[a.expert_in[lowest]];
    return mine - other > a.noise * sqrt(mine + other) + a.least ? lowest : -1;
}

// The first of the missing ones becomes the one with the highest score, if it is to become resident. Whether it is.
bool put_wanted_first(const Choose& a, int64_t missing) {
    int64_t best = 0;
    for (int64_t i = 1; i < missing; i++)
        if (a.scores[a.copied[i]] > a.scores[a.copied[best]]) best = i;
    const int64_t e = a.copied[best];
    if (slot_for(a, e) < 0) return false;
    for (int64_t i = best; i > 0; i--) a.copied[i] = a.copied[i - 1];
    a.copied[0] = e;
    return true;
}

int64_t adopt(const Choose& a, int64_t copies) {
    int64_t adopted = 0;
    for (int64_t i = 0; i < copies; i++) {
        const int64_t e = a.copied[i], slot = a.adopts ? slot_for(a, e) : -1;
        a.adopted[i] = slot;
        if (slot < 0) continue;
        a.slot_of[a.expert_in[slot]] = -1;
        a.expert_in[slot] = e, a.slot_of[e] = slot;
        adopted++;
    }
    return adopted;
}

void choose(const Choose& a, int part, int) {
    if (part) return;
    int64_t used = 0, missing = 0, routed = 0, used_fixed = 0;
    const int64_t all = a.experts + a.fixed;
    for (int64_t e = 0; e < all; e++) a.counts[e] = 0;
    for (int64_t e = 0; e < a.experts; e++) a.cpu[e] = -1;
    for (int64_t p = 0; p < a.routed; p++) {
        int64_t e = a.ids[p] - a.first;
        if (e >= -a.fixed && e < a.experts) a.counts[e < 0 ? e + all : e]++;
    }
    for (int64_t e = a.experts; e < all; e++) used_fixed += a.counts[e] > 0;
    for (int64_t e = 0; e < a.experts; e++) {
        a.scores[e] = a.scores[e] * a.decay + (a.counts[e] > 0);
        used += a.counts[e] > 0;
        if (!a.counts[e] || a.slot_of[e] >= 0) continue;
        int64_t i = missing++;
        if (a.mode == 0)  // by their tokens, and then by their numbers
            for (; i > 0 && a.counts[a.copied[i - 1]] < a.counts[e]; i--) a.copied[i] = a.copied[i - 1];
        a.copied[i] = e;
    }
    int64_t most = a.mode == 2 ? missing : 0;
    const bool may = a.mode == 0 || a.mode == 3;
    const int64_t fewest = may && a.adopts && missing && a.limit > 0 && put_wanted_first(a, missing);
    if (a.mode == 0) {
        double left = 0, best = INFINITY;  // left: of the CPU, of n copies
        for (int64_t n = missing; n >= fewest; n--) {
            const double longer = both(a, left, n ? *a.lag + n * a.copy : 0);
            if (longer <= best && n <= a.limit) best = longer, most = n;
            if (n > 0) left += seconds_of(a.cpu_seconds, a.counts[a.copied[n - 1]]);
        }
    }
    for (int64_t i = most; i < missing; i++) {
        int64_t e = a.copied[i];
        a.cpu[e] = e;
        routed += a.counts[e];
    }
    a.found[0] = used - missing + used_fixed, a.found[1] = missing - most, a.found[3] = routed;
    if (a.mode == 3) most = fewest;
    a.found[2] = most;
    a.found[4] = adopt(a, most);
}

// Give the routed tokens whose experts have weights in this round's stack places, from the round before's last one on.
struct Assign {
    const int32_t* ids;  // [routed]
    const int64_t* at;  // [experts]; -1: not of this round
    int32_t* position;  // [routed], of the routed tokens selected
    int32_t* routed_id;  // [routed] by position
    int32_t* starts;  // [experts + 1] first position of each expert's routed tokens, and where the last one's end
    int64_t routed, experts, first, fresh;  // fresh: this round is the first one, and no routed token had a position before
};

void assign(const Assign& a, int part, int) {
    if (part) return;
    int32_t begin = a.fresh ? 0 : a.starts[a.experts];
    for (int64_t e = 0; e <= a.experts; e++) a.starts[e] = 0;
    if (a.fresh)
        for (int64_t p = 0; p < a.routed; p++) a.position[p] = -1;
    for (int64_t p = 0; p < a.routed; p++) {
        int64_t e = a.ids[p] - a.first;
        if (e >= 0 && e < a.experts && a.at[e] >= 0) a.starts[e + 1]++;
    }
    a.starts[0] = begin;
    for (int64_t e = 0; e < a.experts; e++) a.starts[e + 1] += a.starts[e];
    for (int64_t p = 0; p < a.routed; p++) {
        int64_t e = a.ids[p] - a.first;
        if (e < 0 || e >= a.experts || a.at[e] < 0) continue;
        int32_t position = a.starts[e]++;  // and back below
        a.position[p] = position;
        a.routed_id[position] = (int32_t)p;
    }
    for (int64_t e = a.experts; e > 0; e--) a.starts[e] = a.starts[e - 1];
    a.starts[0] = begin;
}

// y [position] = x [token] of the routed tokens in this round.
struct Gather {
    const void* x;
    void* y;
    const int32_t *routed_id, *starts;
    int64_t experts, k, row, pitch;  // bytes of a row, and from row to row of x
};

void gather(const Gather& a, int part, int parts) {
    int64_t first = a.starts[0];
    Share share(a.starts[a.experts] - first, part, parts);
    for (int64_t i = first + share.first; i < first + share.last; i++)
        memcpy((char*)a.y + i * a.row, (const char*)a.x + a.routed_id[i] / a.k * a.pitch, a.row);
}

// The same, of rows of f16 to rows of f32. row, pitch: elements.
void gather_halves(const Gather& a, int part, int parts) {
    int64_t first = a.starts[0];
    Share share(a.starts[a.experts] - first, part, parts);
    for (int64_t i = first + share.first; i < first + share.last; i++)
        for (int64_t j = 0; j < a.row; j++)
            ((float*)a.y)[i * a.row + j] = widen(((const f16*)a.x)[a.routed_id[i] / a.k * a.pitch + j]);
}

// y [position, outputs] of x [position, inputs] by each position's expert, of plain weights.
struct Grouped {
    const void *x, *paired;  // paired: x as pair_rows makes it; null: tiles are not used
    void* y;
    const void* stack;  // [weights, outputs, inputs]
    const int64_t* at;  // [experts] each one's weight in `stack`
    const void* bias;  // [experts, outputs]; null where there is none
    const int32_t* starts;
    int64_t experts, inputs, outputs;
};

#if defined(TILES)
// x [position, inputs] of experts with enough rows for tiles: sixteens of an expert's rows, with inputs in pairs. Each
// expert's begin behind those that the rows before can have filled.
struct PairRows {
    const void* x;
    void* y;  // [routed / 16 + experts + 1, 16 * inputs]
    const int32_t* starts;
    int64_t experts, inputs;
};

INLINE int64_t paired_at(const int32_t* starts, int64_t expert, int64_t inputs) {
    return (starts[expert] / TILE + expert) * TILE * inputs;
}

void pair_rows(const PairRows& a, int part, int parts) {
    Share share(a.inputs / TILE_INPUTS, part, parts);
    for (int64_t e = 0; e < a.experts; e++) {
        const int64_t first = a.starts[e], rows = a.starts[e + 1] - first;
        if (!tiles_take(rows, a.inputs)) continue;
        for (int64_t m = 0; m < rows; m += TILE) {
            const bf16* x = (const bf16*)a.x + (first + m) * a.inputs;
            bf16* y = (bf16*)a.y + paired_at(a.starts, e, a.inputs) + m * a.inputs;
            const int count = rows - m < TILE ? (int)(rows - m) : TILE;
            for (int64_t g = share.first; g < share.last; g++) pair_tile(x, a.inputs, g, count, y + g * PAIRED);
        }
    }
}

OP(pair_rows, pair_rows, PairRows)
// For who makes room for y, and does not call this where no expert has rows for tiles.
EXPORT const int64_t tile_rows = TILE, paired_rows = PAIRED_ROWS;
#endif

// Computes by AMX tiles, where there are any and they are faster.
template <typename Out> INLINE bool grouped_by_tiles(const Grouped&, const Linear&, int64_t, int, int, ...) { return false; }
#if defined(TILES)
template <typename Out>
INLINE bool grouped_by_tiles(const Grouped& a, const Linear& one, int64_t e, int part, int parts, const bf16*) {
    if (!a.paired || !tiles_take(one.rows, a.inputs)) return false;
    tiled<Out>(one, (const bf16*)a.paired + paired_at(a.starts, e, a.inputs), part, parts);
    return true;
}
#endif

template <typename T, typename Out, typename W = T> void grouped(const Grouped& a, int part, int parts) {
    for (int64_t e = 0; e < a.experts; e++) {
        int64_t first = a.starts[e], rows = a.starts[e + 1] - first;
        if (!rows) continue;
        const T* bias = a.bias ? (const T*)a.bias + e * a.outputs : nullptr;
        const W* weight = (const W*)a.stack + a.at[e] * a.outputs * a.inputs;
        Linear one = {(const T*)a.x + first * a.inputs, weight, bias, (Out*)a.y + first * a.outputs,
                      rows, a.inputs, a.outputs, a.inputs};
        if (!grouped_by_tiles<Out>(a, one, e, part, parts, weight)) linear<T, Out, W>(one, part, parts);
    }
#if defined(TILES)
    tiles_end();
#endif
}

// y [tokens, hidden] = the sum over a token's routed tokens that have a position of weight * made [position], in f32.
struct Combine {
    const void* made;
    const float* weights;  // [routed]
    const int32_t* position;  // -1: none
    void* y;
    int64_t tokens, k, hidden;
};

template <typename T, typename Out> void combine(const Combine& a, int part, int parts) {
    Share share((a.hidden + LANES - 1) / LANES, part, parts);
    const int64_t first = share.first * LANES, last = share.last * LANES < a.hidden ? share.last * LANES : a.hidden;
    for (int64_t t = 0; t < a.tokens; t++) {
        Out* y = (Out*)a.y + t * a.hidden;
        for (int64_t i = first; i < last; i += LANES) {
            const int64_t count = last - i;
            Vec sum = {};
            for (int64_t p = t * a.k; p < (t + 1) * a.k; p++) {
                if (a.position[p] < 0) continue;
                const T* made = (const T*)a.made + a.position[p] * a.hidden + i;
                sum += a.weights[p] * (count >= LANES ? load(made) : load(made, count));
            }
            if (count >= LANES)
                store(y + i, sum);
            else
                store(y + i, sum, count);
        }
    }
}

OP(choose_experts, choose, Choose)
OP(assign_rows, assign, Assign)
OP(gather_rows, gather, Gather)
OP(gather_halves, gather_halves, Gather)
OP(combine_routed_f32, (combine<float, float>), Combine)
OP(combine_routed_bf16, (combine<bf16, float>), Combine)
OP(combine_routed_to_bf16, (combine<bf16, bf16>), Combine)
OP(experts_up_f32, (grouped<float, float>), Grouped)
OP(experts_up_bf16, (grouped<bf16, bf16>), Grouped)
OP(experts_down_f32, (grouped<float, float>), Grouped)
OP(experts_down_bf16, (grouped<bf16, float>), Grouped)
OP(experts_f32_of_bf16, (grouped<float, float, bf16>), Grouped)
OP(experts_f32_of_f16, (grouped<float, float, f16>), Grouped)
