// What decode.cu multiplies keys by: a sequence's query heads of one key head. Where FP8, each 16 elements are in the order of
// keys' codes (fp8_operand.cuh).

struct Heads {  // of a sequence, as one warp prepares them for the others
    Operand rotated[ROWS * WIDE];
    T v[DIM];  // where FP8 the newest token's codes
    float scores[16];  // of the newest token
    // Where FP8: `rotated` has queries divided by q_scale; v_exponent is of the newest value's scale.
    float q_scale;
    int v_exponent, unused[2];
};

typedef Vec<T, PAIRS> HeadPart;  // of a head, both halves of a lane

// The lane's number among the LANES of a head. The others have a head's beginning once more and store the same there; sums
// leave them out.
__device__ inline int head_lane() { return threadIdx.x % 32 % LANES; }
__device__ inline float head_sum(float x) { return warp_sum(threadIdx.x % 32 < LANES ? x : 0); }

// The lane's parts of a head as codes, whose scale is returned, and as the cache will give them back.
__device__ inline int round_trip(HeadPart& low, HeadPart& high, Vec<e4m3, PAIRS>& low_codes, Vec<e4m3, PAIRS>& high_codes) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) most = fmaxf(most, fmaxf(fabsf(to_float(low.x[i])), fabsf(to_float(high.x[i]))));
    const int exponent = scale_exponent(warp_max(most));
    const float by = inverse_scale(exponent), back = scale_of(exponent);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        low_codes.x[i] = from_float<e4m3>(to_float(low.x[i]) * by);
        high_codes.x[i] = from_float<e4m3>(to_float(high.x[i]) * by);
        low.x[i] = from_float<T>(to_float(low_codes.x[i]) * back), high.x[i] = from_float<T>(to_float(high_codes.x[i]) * back);
    }
    return exponent;
}

// A sequence's query heads and, as the last one, its key: normed where NORM, then rotated.
__device__ __forceinline__ void norm_and_rotate(const Step& step, int b, HeadPart (&low)[GROUP + 1], HeadPart (&high)[GROUP + 1]) {
    const int at = head_lane() * PAIRS;
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
            scale = rsqrtf(head_sum(scale) / DIM + step.eps);
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

// A token's key and value, as elements or, where FP8, as codes with scales of_k and of_v.
__device__ __forceinline__ void write_to_cache(const Step& step, long long slot, int head, const HeadPart& k_low,
                                               const HeadPart& k_high, const HeadPart& v_low, const HeadPart& v_high,
                                               const Vec<e4m3, PAIRS> (&codes)[4], int of_k, int of_v) {
    const long long in_cache = (slot * KV_HEADS + head) * DIM + head_lane() * PAIRS;
    if (FP8) {
        e4m3 *const keys = (e4m3*)step.keys + in_cache, *const values = (e4m3*)step.values + in_cache;
        typedef Vec<e4m3, PAIRS> Codes;
        *(Codes*)keys = codes[0], *(Codes*)(keys + HALF) = codes[1];
        *(Codes*)values = codes[2], *(Codes*)(values + HALF) = codes[3];
        unsigned char* const scales = step.scales + (slot / SIZE * KV_HEADS + head) * 2 * SIZE + slot % SIZE;
        if (threadIdx.x % 32 == 0) scales[0] = of_k, scales[SIZE] = of_v;
        return;
    }
    *(HeadPart*)(step.keys + in_cache) = k_low, *(HeadPart*)(step.keys + in_cache + HALF) = k_high;
    *(HeadPart*)(step.values + in_cache) = v_low, *(HeadPart*)(step.values + in_cache + HALF) = v_high;
}

// A sequence's query heads as f16, all of them divided by one power of two (query_exponent).
__device__ inline void store_queries(const HeadPart (&low)[GROUP + 1], const HeadPart (&high)[GROUP + 1], Heads& to) {
    float most = 0;
#pragma unroll
    for (int g = 0; g < GROUP; g++)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) most = fmaxf(most, fmaxf(fabsf(to_float(low[g].x[i])), fabsf(to_float(high[g].x[i]))));
    const int exponent = query_exponent(warp_max(most));
    const float by = inverse_scale(exponent);
#pragma unroll
    for (int g = 0; g < GROUP; g++)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int d = head_lane() * PAIRS + i;
            Operand* const place = to.rotated + g * WIDE + d / 16 * 16 + d % 4 / 2 * 8 + d % 16 / 4 * 2 + d % 2;
            place[0] = from_float<Operand>(to_float(low[g].x[i]) * by);
            place[HALF] = from_float<Operand>(to_float(high[g].x[i]) * by);
        }
    if (threadIdx.x % 32 == 0) to.q_scale = scale_of(exponent);
}

// What prepare() reads besides q, k and v is brought near, which grid_wait() need not have been passed for.
__device__ __forceinline__ void prefetch_rotation(const Step& step, int b) {
    const int at = head_lane() * PAIRS;
    prefetch_line(step.cos + (long long)b * DIM + at), prefetch_line(step.sin + (long long)b * DIM + HALF + at);
    prefetch_line(step.slots + b);
    if (NORM) {
        prefetch_line(step.q_weight + at), prefetch_line(step.q_weight + HALF + at);
        prefetch_line(step.k_weight + at), prefetch_line(step.k_weight + HALF + at);
    }
}

// Heads are normed and rotated where ROTATE; with `newest` its key and value go to the cache.
__device__ inline void prepare(const Step& step, int b, int head, bool newest, Heads& to) {
    const int lane = threadIdx.x % 32, at = head_lane() * PAIRS;
    typedef HeadPart Part;
    Part low[GROUP + 1], high[GROUP + 1], v_low, v_high;  // the last one: the key
    const long long slot = newest ? step.slots[b] : -1;
#pragma unroll
    for (int g = 0; g < GROUP + ROTATE; g++) {
        const T* x = step.q + (long long)b * step.q_row + (head * GROUP + g) * DIM;
        if (g == GROUP) x = step.k + (long long)b * step.k_row + head * DIM;
        low[g] = *(const Part*)(x + at), high[g] = *(const Part*)(x + HALF + at);
    }
    if (ROTATE) {
        const T* x = step.v + (long long)b * step.v_row + head * DIM + at;
        v_low = *(const Part*)x, v_high = *(const Part*)(x + HALF);
        norm_and_rotate(step, b, low, high);
    }
    if (FP8) {
        store_queries(low, high, to);
    } else {
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            Operand* const rotated = to.rotated + g * WIDE;
            *(Part*)(rotated + at) = low[g], *(Part*)(rotated + HALF + at) = high[g];
        }
    }
    if (!newest) return;
    Vec<e4m3, PAIRS> codes[4];
    int of_k = 0, of_v = 0;
    if (FP8) {
        of_k = round_trip(low[GROUP], high[GROUP], codes[0], codes[1]);
        of_v = round_trip(v_low, v_high, codes[2], codes[3]);
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        float s = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            s += to_float(low[g].x[i]) * to_float(low[GROUP].x[i]) + to_float(high[g].x[i]) * to_float(high[GROUP].x[i]);
        s = head_sum(s);
        if (lane == 0) to.scores[g] = score<SOFTCAP>(s, step.scale, step.softcap);
    }
    if (slot >= 0) write_to_cache(step, slot, head, low[GROUP], high[GROUP], v_low, v_high, codes, of_k, of_v);
    if (FP8) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            v_low.x[i] = from_float<T>(to_float(codes[2].x[i])), v_high.x[i] = from_float<T>(to_float(codes[3].x[i]));
        to.v_exponent = of_v;
    }
    *(Part*)(to.v + at) = v_low, *(Part*)(to.v + HALF + at) = v_high;
}
