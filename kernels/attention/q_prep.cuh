// What decode.cu multiplies keys by: a sequence's query heads of one key head.

struct Heads {  // of a sequence, as one warp prepares them for the others
    T turned[ROWS * WIDE], v[DIM];
    float scores[16];  // of the newest token
};

// Heads are normed and turned where TURN; with `newest` its key and value go to the cache.
__device__ inline void prepare(const Step& step, int b, int head, bool newest, Heads& to) {
    const int lane = threadIdx.x % 32, at = lane * PAIRS;
    typedef Vec<T, PAIRS> Part;
    Part low[GROUP + 1], high[GROUP + 1], v_low, v_high;  // the last one: the key
    const long long slot = newest ? step.slots[b] : -1, in_cache = (slot * KV_HEADS + head) * DIM + at;
#pragma unroll
    for (int g = 0; g < GROUP + TURN; g++) {
        const T* x = step.q + (long long)b * step.q_row + (head * GROUP + g) * DIM;
        if (g == GROUP) x = step.k + (long long)b * step.k_row + head * DIM;
        low[g] = *(const Part*)(x + at), high[g] = *(const Part*)(x + HALF + at);
    }
    if (TURN) {
        const T* x = step.v + (long long)b * step.v_row + head * DIM + at;
        v_low = *(const Part*)x, v_high = *(const Part*)(x + HALF);
        float cos[PAIRS], sin[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            cos[i] = step.cos[(long long)b * DIM + at + i], sin[i] = step.sin[(long long)b * DIM + HALF + at + i];
#pragma unroll
        for (int g = 0; g < GROUP + 1; g++) {
            const T* weight = g < GROUP ? step.q_weight : step.k_weight;
            float scale = 0;
            if (NORM) {
#pragma unroll
                for (int i = 0; i < PAIRS; i++)
                    scale += to_float(low[g].x[i]) * to_float(low[g].x[i]) + to_float(high[g].x[i]) * to_float(high[g].x[i]);
                scale = rsqrtf(warp_sum(scale) / DIM + step.eps);
            }
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                float x0 = to_float(low[g].x[i]), x1 = to_float(high[g].x[i]);
                if (NORM) {
                    x0 = to_float(from_float<T>(x0 * scale * to_float(weight[at + i])));
                    x1 = to_float(from_float<T>(x1 * scale * to_float(weight[HALF + at + i])));
                }
                low[g].x[i] = from_float<T>(x0 * cos[i] - x1 * sin[i]), high[g].x[i] = from_float<T>(x1 * cos[i] + x0 * sin[i]);
            }
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++)
        *(Part*)(to.turned + g * WIDE + at) = low[g], *(Part*)(to.turned + g * WIDE + HALF + at) = high[g];
    if (!newest) return;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        float s = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            s += to_float(low[g].x[i]) * to_float(low[GROUP].x[i]) + to_float(high[g].x[i]) * to_float(high[GROUP].x[i]);
        s = warp_sum(s);
        if (lane == 0) to.scores[g] = score<CAPPED>(s, step.scale, step.cap);
    }
    *(Part*)(to.v + at) = v_low, *(Part*)(to.v + HALF + at) = v_high;
    if (slot < 0) return;
    *(Part*)(step.keys + in_cache) = low[GROUP], *(Part*)(step.keys + in_cache + HALF) = high[GROUP];
    *(Part*)(step.values + in_cache) = v_low, *(Part*)(step.values + in_cache + HALF) = v_high;
}
